"""Run EAGLE and this project on one checkpoint and compare them, cycle by cycle: ``scripts/diff_upstream.sh PATH_TO_EAGLE``.

EAGLE runs in a process and an environment of its own. For each of its cycles the Top-K tree of this project is drafted at the same context,
and the two trees are compared: tokens, parents, mask, positions, scores. At temperature 0 the texts and accept lengths are compared too, at
other temperatures tau, which must agree within its error. Exit code 0: the same, or ties of score listed; 1: a difference that is no tie.
"""

import argparse
import ast
import inspect
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle.model.demo import DEMO_NAME, demo_head_path, demo_target_path
from eagle.model.draft.checkpoint import head_folder, read_config
from eagle.model.ea_model import EaModel
from eagle.model.target import TargetModel
from eagle.model.tuning.contexts import contexts
from eagle.traineagle3.new_head import new_config, new_head, save_head
from evaluation.common.prompts import build_prompt
from evaluation.common.questions import load_questions, question_file
from evaluation.common.statistics import Statistic, show
from evaluation.gen_ea_answer import build_parser as answer_parser
from evaluation.speed.bench import Clock, networks
from rheo import Tree

COMMIT = "cb7e084"
TINY = "tiny"
TIE = 1e-5  # of log path scores, float32
FALSE_ALARM = 1e-6  # of the comparison of tau
CLOSE = 1e-3  # largest difference of the same node's score, from other kernels in another order
# EAGLE's name: why it is not here.
NOT_HERE = {
    "forward": "EAGLE's inner step of the target; here TargetModel.tree_forward",
    "--load-in-8bit": "pass quantization_config to EaModel.from_pretrained",
    "--num-gpus-per-model": "device_map places layers; accelerate launch makes processes",
    "--num-gpus-total": "accelerate launch makes processes",
    "--max-gpu-memory": "device_map and max_memory go to the target's from_pretrained",
    "--tree-choices": "EAGLE-1's static trees",
    "--is_llama3": "the stop set always holds the template's end-of-turn token",
    "--threshold": "only its default has a meaning in EAGLE-3",
    "--use_eagle3": "always on, accepted as --use-eagle3",
}


@dataclass
class Difference:
    """Where two trees differ.

    Attributes:
        ties: nodes that only one of them keeps, within ``TIE`` of the score that decides.
        faults: all else, in words.
    """

    ties: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """The tokens from the root's child down to each node; the root's is empty."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:]):
        paths.append((*paths[parent], token))
    return paths


def compare_trees(theirs: dict, ours: Tree) -> Difference:
    """Compare one cycle's tree of EAGLE (see ``worker``) with ours at the same context."""
    found = Difference()
    mask = torch.tensor(theirs["mask"])
    levels = mask.sum(1) - 1
    # The parent of a node is the deepest of those that it sees besides itself.
    parents = [0] + [
        max((j for j in range(i) if mask[i, j]), key=lambda j: int(levels[j]))
        for i in range(1, len(mask))
    ]
    if theirs["positions"] != levels.tolist():
        found.faults.append("EAGLE's positions are not the depths of its nodes")
    valid = ours.valid.tolist()
    our_tokens, our_parents = ours.tokens.tolist(), ours.parents.tolist()
    their_paths, our_paths = paths_of(theirs["tokens"], parents), paths_of(our_tokens, our_parents)
    their_scores = dict(zip(their_paths, theirs["scores"]))
    our_scores = {
        path: score for path, score, real in zip(our_paths, ours.log_scores.tolist(), valid) if real
    }
    for mine, other, owner in (
        (their_scores, our_scores, "EAGLE"),
        (our_scores, their_scores, "ours"),
    ):
        for path in sorted(mine.keys() - other.keys(), key=len):
            gap = swap_gap(path, mine, other)
            text = f"only in {owner}: {list(path)}, score {mine[path]:.6f}, {gap:.1e} from what stands in its place"
            (found.ties if gap <= TIE else found.faults).append(text)
    for path in their_scores.keys() & our_scores.keys():
        if abs(their_scores[path] - our_scores[path]) > CLOSE:
            found.faults.append(
                f"node {list(path)} has score {their_scores[path]:.6f} in EAGLE and {our_scores[path]:.6f} here"
            )
    if not found.ties and not found.faults and their_paths != our_paths:
        swapped = next(i for i, (a, b) in enumerate(zip(their_paths, our_paths)) if a != b)
        gap = abs(their_scores[their_paths[swapped]] - our_scores[our_paths[swapped]])
        text = f"node {swapped} is {list(their_paths[swapped])} in EAGLE and {list(our_paths[swapped])} here, scores {gap:.1e} apart"
        (found.ties if gap <= TIE else found.faults).append(text)
    if not found.ties and not found.faults and not torch.equal(mask, ours.mask):
        found.faults.append("the masks of equal trees differ")
    return found


def swap_gap(path: tuple[int, ...], mine: dict, other: dict) -> float:
    """How near in score a node that only one tree has is to a node that could stand in its place in the other.

    That is a node which only the other has; or, where the choice fell higher up, the same question for its parent: a parent which only
    one tree has, or one that was expanded where another of its score was.
    """
    rivals = [score for candidate, score in other.items() if candidate not in mine]
    gaps = [abs(mine[path] - score) for score in rivals]
    parent = path[:-1]
    if parent and parent not in other:
        gaps.append(swap_gap(parent, mine, other))
    elif parent:
        fathers = {candidate[:-1] for candidate in other if candidate and candidate not in mine} - {
            parent,
            (),
        }
        gaps += [abs(mine[parent] - other[father]) for father in fathers if father in other]
    return min(gaps, default=float("inf"))


def compare(record: dict, model: EaModel, prompt: list[int], options, report) -> int:
    """Compare one of EAGLE's runs; returns the number of faults."""
    text = torch.tensor(record["output"])
    cycles = record["cycles"][: record["cycles_run"]]
    positions = [cycle["context"] for cycle in cycles]
    ties = faults = 0
    for number, (cycle, context) in enumerate(
        zip(cycles, contexts(model.target, model.draft, text, positions, [options]))
    ):
        found = compare_trees(cycle, context.tree)
        for kind, lines in (("tie", found.ties), ("FAULT", found.faults)):
            for line in lines[:3]:
                report(f"  {kind} in cycle {number}: {line}")
        ties, faults = ties + bool(found.ties), faults + bool(found.faults)
    report(
        f"prompt {record['prompt']}, seed {record['seed']}: {len(cycles)} trees compared, {ties} with ties, {faults} with faults"
    )
    if options.warpers.greedy:
        result = model.generate(torch.tensor([prompt]), options)
        theirs = record["output"][len(prompt) :]
        shared = min(len(theirs), result.new_tokens)
        if theirs[:shared] != result.token_ids[:shared]:
            first = next(i for i in range(shared) if theirs[i] != result.token_ids[i])
            gap = top_two_gap(model, record["output"][: len(prompt) + first])
            kind = "tie" if gap <= TIE else "FAULT"
            ids = theirs[first], result.token_ids[first]
            report(
                f"  {kind}: token {first} is {ids[0]} in EAGLE and {ids[1]} here, top two logits {gap:.1e} apart"
            )
            faults += kind == "FAULT"
        elif ties == faults == 0:
            lengths = [b - a for a, b in zip(positions, positions[1:])]
            if any(
                a != b for a, b in zip(lengths, result.accept_lengths)
            ):  # EAGLE runs over its cap by a cycle or two
                report(
                    f"  FAULT: accept lengths {lengths} in EAGLE and {result.accept_lengths} here"
                )
                faults += 1
    return faults


def top_two_gap(model: EaModel, ids: list[int]) -> float:
    """Difference of the target's two highest logits after ``ids``."""
    top = model.base_model(torch.tensor([ids])).logits[0, -1].float().topk(2).values
    return (top[0] - top[1]).item()


def readable_by_eagle(model: EaModel, head: str, folder: Path) -> tuple[Path, Path]:
    """Copies of target and head that EAGLE and its transformers can read: old names in the configs, the embedding beside the head."""
    target, copy = folder / "target", folder / "head"
    model.base_model.save_pretrained(target)
    config = json.loads((target / "config.json").read_text())
    config["rope_theta"] = (config.pop("rope_parameters", None) or {}).get("rope_theta", 10000.0)
    config["torch_dtype"] = "float32"
    (target / "config.json").write_text(json.dumps(config))
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(target)
        settings = json.loads((target / "tokenizer_config.json").read_text())
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings.pop("extra_special_tokens", None)
        (target / "tokenizer_config.json").write_text(json.dumps(settings))
    save_head(
        model.draft, read_config(head_folder(head)), copy, torch.float32, model.target.embedding
    )
    return target, copy


def tiny_pair(folder: Path, vocab: int = 64, draft_vocab: int = 48) -> tuple[str, str]:
    """A random target of eight small layers with a tokenizer of words, and a head begun from it: folders that load in a moment."""
    torch.manual_seed(0)
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(vocab - 3))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, initializer_range=0.3, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval()
    target.save_pretrained(folder / "tiny-target")
    fast.save_pretrained(folder / "tiny-target")
    model = TargetModel(target)
    settings = new_config(model, draft_vocab)
    draft, _ = new_head(model, settings, torch.arange(draft_vocab) + (vocab - draft_vocab), seed=0)
    save_head(draft, settings, folder / "tiny-head", torch.float32)
    return str(folder / "tiny-target"), str(folder / "tiny-head")


def run_eagle(python: Path, job: dict, program: str = "worker.py") -> list[dict]:
    """EAGLE's records of a job, from a program of this folder that stands alone.

    Raises:
        OSError: with the end of its output where it failed.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(job, file)
        file.flush()
        worker = Path(__file__).with_name(program)
        done = subprocess.run([str(python), str(worker), file.name], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"EAGLE's process failed:\n{done.stderr[-3000:]}")
    return [
        json.loads(line.removeprefix("RECORD "))
        for line in done.stdout.splitlines()
        if line.startswith("RECORD ")
    ]


def arguments_of(tree: ast.Module, class_name: str) -> dict[str, list[str]]:
    """The public methods of a class and their arguments, from its source."""
    body = next(
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name
    ).body
    functions = [
        node for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    return {
        f.name: [a.arg for a in (*f.args.args, *f.args.kwonlyargs) if a.arg not in ("self", "cls")]
        for f in functions
    }


def names_table(eagle: Path) -> str:
    """API and flag names of both: same, added, missing with the reason."""
    theirs = arguments_of(
        ast.parse((eagle / "eagle/model/ea_model.py").read_text(encoding="utf-8")), "EaModel"
    )
    ours = {
        n: list(inspect.signature(f).parameters)[1:]
        for n, f in inspect.getmembers(EaModel, callable)
        if not n.startswith("_")
    }
    ours["from_pretrained"] = list(inspect.signature(EaModel.from_pretrained).parameters)
    script = eagle / "eagle/evaluation/gen_ea_answer_llama3chat.py"
    flags = set()
    if script.exists():
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "attr", "") == "add_argument"
                and isinstance(node.args[0], ast.Constant)
            ):
                flags.add(node.args[0].value)
    our_flags = {
        option
        for action in answer_parser(True)._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    lines = ["| EAGLE | here | |", "| --- | --- | --- |"]
    for name in sorted(theirs):
        if name not in ours:
            lines.append(f"| `{name}` | missing | {NOT_HERE.get(name) or ''} |")
            continue
        missing = [a for a in theirs[name] if a not in ours[name] and "kwargs" not in ours[name]]
        added = [a for a in ours[name] if a not in theirs[name] and a not in ("kwargs", "args")]
        notes = [f"missing {', '.join(missing)}"] * bool(missing) + [
            f"added {', '.join(added)}"
        ] * bool(added)
        lines.append(f"| `{name}` | same name | {'; '.join(notes)} |")
    for flag in sorted(flags | our_flags):
        where = "same" if flag in flags & our_flags else "added" if flag in our_flags else "missing"
        here = "missing" if where == "missing" else f"`{flag}`"
        lines.append(
            f"| {f'`{flag}`' if flag in flags else ''} | {here} | {NOT_HERE.get(flag) or where} |"
        )
    return "\n".join(lines)


def faults_table(eagle: Path, python: Path) -> str:
    """The faults of the checkout that ``faults`` could provoke."""
    with tempfile.TemporaryDirectory() as scratch:
        base, head = tiny_pair(Path(scratch), 512, 384)
        target, copy = readable_by_eagle(
            EaModel.from_pretrained(base, head, dtype="fp32"), head, Path(scratch)
        )
        job = {
            "eagle": str(eagle),
            "base": str(target),
            "head": str(copy),
            "plain_head": head,
            "scratch": scratch,
        }
        records = run_eagle(python, job, "faults.py")
    lines = [f"| {r['about']} | {r['seen'] or 'not seen'} | `{r['fault']}` |" for r in records]
    return "\n".join(
        ["| EAGLE | seen | in evaluation/upstream/faults.py |", "| --- | --- | --- |", *lines]
    )


def tau_of(
    records: list[dict], model: EaModel, prompts: list[list[int]], args: argparse.Namespace
) -> tuple[Statistic, Statistic]:
    """tau of EAGLE and ours over the same prompts and seeds; every run is a cluster of its own, since only chance differs."""
    sums: list[dict] = [{}, {}, {}, {}]
    for record in records:
        key, positions = (
            (record["prompt"], record["seed"]),
            [cycle["context"] for cycle in record["cycles"]],
        )
        lengths = [b - a for a, b in zip(positions, positions[1:])]
        options = model.options(
            temperature=args.temperature,
            max_new_tokens=args.max_new_token,
            max_length=None,
            seed=record["seed"],
        )
        ours = model.generate(torch.tensor([prompts[record["prompt"]]]), options).accept_lengths
        for table, value in zip(sums, (sum(lengths), len(lengths), sum(ours), len(ours))):
            table[key] = value
    return Statistic.ratio(sums[0], sums[1]), Statistic.ratio(sums[2], sums[3])


def speeds(
    records: list[dict], model: EaModel, prompts: list[list[int]], args: argparse.Namespace
) -> str:
    """Seconds a cycle and tokens/s of EAGLE, ours and ours with RheoSampling, on the same prompts and seeds, in float32.

    Whole requests, prefill included. "Outside the networks" is what remains without the time inside the modules of target and head.
    """
    lines = [
        "| | cycles | ms a cycle | of these outside the networks | tokens/s |",
        "| --- | --- | --- | --- | --- |",
    ]

    def add(name: str, cycles: int, tokens: int, seconds: float, inside: float) -> None:
        cost, outside = (1e3 * x / max(cycles, 1) for x in (seconds, seconds - inside))
        lines.append(f"| {name} | {cycles} | {cost:.1f} | {outside:.2f} | {tokens / seconds:.2f} |")

    add(
        "EAGLE, Top-K",
        *(
            sum(r[name] for r in records)
            for name in ("cycles_run", "new_token", "seconds", "inside")
        ),
    )
    clock = Clock(networks(model))
    model.generate(
        torch.tensor([prompts[0]]), model.options(temperature=args.temperature, max_new_tokens=4)
    )  # warm-up
    for name, more in (
        ("here, Top-K", {"sampling": "topk"}),
        ("here, RheoSampling m = 1", {"sampling": "rheo", "m": 1}),
    ):
        cycles, tokens, seconds, clock.seconds = 0, 0, 0.0, 0.0
        for record in records:
            probs = {
                "temperature": args.temperature,
                "max_new_tokens": args.max_new_token,
                "max_length": None,
                "seed": record["seed"],
            }
            options = model.options(**probs, **more)
            start = time.perf_counter()
            result = model.generate(torch.tensor([prompts[record["prompt"]]]), options)
            seconds += time.perf_counter() - start
            cycles, tokens = cycles + result.cycles, tokens + result.new_tokens
        add(name, cycles, tokens, seconds, clock.seconds)
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Run both, compare, print; returns the exit code."""
    for file in ("eagle/model/ea_model.py", "eagle/model/cnets.py"):
        if not (args.eagle / file).is_file():
            raise ValueError(
                f"{args.eagle} is no checkout of EAGLE: {file} is missing (this was made for commit {COMMIT})"
            )
    if args.faults:
        print(faults_table(args.eagle, args.python))
        return 0
    size = {"total_token": args.total_token, "depth": args.depth, "top_k": args.top_k}
    questions = load_questions(args.question_file or question_file("demo"), None, args.limit)
    texts = [question.turns[0] for question in questions]
    with tempfile.TemporaryDirectory() as scratch:
        if args.base_model_path == TINY:
            base, head = tiny_pair(Path(scratch))
            texts = [
                " ".join(f"w{(7 * i + 3 * j) % 61}" for j in range(6 + i))
                for i in range(len(texts))
            ]
        elif args.base_model_path == DEMO_NAME:
            base, head = demo_target_path(), args.ea_model_path or demo_head_path()
        else:
            base, head = args.base_model_path, args.ea_model_path
        if head is None:
            raise ValueError(
                f"--ea-model-path is missing; only {DEMO_NAME} and {TINY} bring their own heads"
            )
        model = EaModel.from_pretrained(base, head, dtype="fp32", **size)
        if model.tokenizer is None:
            raise ValueError("EAGLE needs the target's tokenizer, and there is none")
        prompts = [build_prompt("auto", model.tokenizer, [text], [])[0].tolist() for text in texts]
        target, copy = readable_by_eagle(model, head, Path(scratch))
        job = {
            "eagle": str(args.eagle), "base": str(target), "head": str(copy), "prompts": prompts, "seeds": list(range(args.seeds)),
            "temperature": args.temperature, "max_new_tokens": args.max_new_token, "threads": torch.get_num_threads(),
            "max_length": max(map(len, prompts)) + args.max_new_token + 2 * args.total_token + 32, **size,
        }  # fmt: skip
        print(
            f"EAGLE: {len(prompts)} prompts x {args.seeds} seeds, T = {args.temperature:g}, tree {args.total_token}x{args.depth}",
            flush=True,
        )
        records = run_eagle(args.python, job)
    options = model.options(
        temperature=args.temperature, max_new_tokens=args.max_new_token, max_length=None
    )
    faults = sum(
        compare(record, model, prompts[record["prompt"]], options, tqdm.write)
        for record in tqdm(records, unit="run")
    )
    if not options.warpers.greedy:
        theirs, ours = tau_of(records, model, prompts, args)
        difference = ours.minus(theirs)
        p = difference.p_value()
        print(
            f"tau: EAGLE {show(theirs.estimate())}, here {show(ours.estimate())}, difference {show(difference.estimate(), True)}, p {p}"
        )
        if p is not None and p < FALSE_ALARM:
            print(f"FAULT: with the same law so large a difference has probability {p:.1e}")
            faults += 1
    if args.names:
        print(names_table(args.eagle))
    print(speeds(records, model, prompts, args))
    print("The same" if not faults else f"{faults} faults", flush=True)
    return 1 if faults else 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evaluation.diff_upstream", description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("eagle", type=Path, help=f"checkout of SafeAILab/EAGLE (made for commit {COMMIT})")
    add(
        "--python",
        type=Path,
        required=True,
        help="Python of EAGLE's environment (scripts/diff_upstream.sh makes one)",
    )
    add(
        "--base-model-path",
        default=DEMO_NAME,
        help=f"a target that EAGLE supports (Llama, Qwen2, Qwen3), {DEMO_NAME}, or {TINY}",
    )
    add("--ea-model-path", help="its EAGLE-3 head (smollm2-demo brings its own)")
    add("--question-file", type=Path, help="prompts; default: the demo's questions")
    add("--limit", type=int, default=4, help="prompts")
    add("--seeds", type=int, default=1, help="runs of each")
    add("--temperature", type=float, default=0.0)
    add("--max-new-token", type=int, default=32)
    add("--total-token", type=int, default=60)
    add("--depth", type=int, default=7)
    add("--top-k", type=int, default=10)
    add(
        "--faults",
        action="store_true",
        help="provoke the checkout's faults on a tiny pair, and nothing else",
    )
    add("--names", action="store_true", help="print the table of API and flag names too")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Entry point; exit code 1 for a fault, 2 for bad input."""
    args = build_parser().parse_args(argv)
    try:
        code = run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
