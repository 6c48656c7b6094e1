from setuptools import find_packages, setup

setup(
    name="rheosampling",
    version="0.1.0",
    description="RheoSampling on EAGLE-3: lossless stochastic speculative decoding that accepts more tokens a cycle",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["eagle*", "rheo*", "evaluation*"]),
    package_data={"eagle": ["demo/*", "data/*/*.jsonl"]},
    install_requires=[
        "torch>=2.6",
        "transformers>=5.17",
        "accelerate>=1.0",
        "fschat>=0.2.36",
        "gguf>=0.10",
        "huggingface_hub",
        "markdown2>=2.4",
        "matplotlib>=3.8",
        "numpy",
        "protobuf>=4",  # with sentencepiece: tokenizers that come as tokenizer.model, Vicuna's among them
        "safetensors>=0.4",
        "scipy>=1.11",
        "sentencepiece>=0.2",
        "tqdm",
    ],
    extras_require={"test": ["pytest>=8"]},
)
