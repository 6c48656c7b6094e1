"""The generation loop and the calls: caps, stop tokens, seeds, streaming, results, errors."""

import inspect

import pytest
import torch
from support.tiny import PROMPT, tiny_head, tiny_pair, tiny_target, tiny_tokenizer

from eagle.model import cuda_graph, cycle, decoding
from eagle.model.cycle import NonFiniteLogits, summarise
from eagle.model.decoding import decode
from eagle.model.ea_model import EaModel
from eagle.model.options import DecodingOptions
from eagle.model.tokens import stop_token_ids
from rheo import KIND_NAMES, Tree, VerifyResult

SAMPLINGS = {
    "plain": {"sampling": "none"},
    "topk": {"sampling": "topk"},
    "rheo-0": {"sampling": "rheo", "m": 0},
    "rrsw": {"sampling": "rheo", "verification": "rrsw"},
}
over_samplings = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)


@pytest.fixture(scope="module")
def model():
    return tiny_pair()


def assert_decodes_as_plainly(model, prompt, new, sampling):
    """At temperature 0 drafting changes the speed, not the tokens."""
    result = model.eagenerate(prompt, max_new_tokens=new, **sampling)
    assert result.tolist() == model.naivegenerate(prompt, max_new_tokens=new).tolist()


@over_samplings
@pytest.mark.parametrize("cap", [0, 1, 2, 7, 23])
def test_cap_on_new_tokens_is_exact(model, cap, sampling):
    ids, new_token, idx = model.eagenerate(
        PROMPT, temperature=1.0, max_new_tokens=cap, log=True, **sampling
    )
    assert ids.shape == (1, PROMPT.numel() + cap) and new_token == cap
    assert (idx == -1) == (cap < 2)


def test_max_length_counts_the_prompt_and_a_longer_prompt_is_an_error(model):
    assert model.eagenerate(PROMPT, max_length=10).shape[1] == 10
    assert model.eagenerate(PROMPT, max_length=6).shape[1] == 6
    with pytest.raises(ValueError, match="prompt has 6 tokens and max_length is 5"):
        model.eagenerate(PROMPT, max_length=5)


@over_samplings
def test_output_ends_at_the_first_stop_token_also_inside_a_block(model, sampling):
    options = {"temperature": 1.0, "max_new_tokens": 40, "seed": 3} | sampling
    new = model.generate(PROMPT, model.options(**options)).token_ids
    for stop in set(new):
        kept = new[: new.index(stop) + 1]
        result = model.generate(PROMPT, model.options(**options, stop_token_ids=(stop,)))
        assert result.output_ids[0].tolist() == PROMPT[0].tolist() + kept
        assert result.new_tokens == len(kept) and result.stop_reason == "stop"


@pytest.fixture
def scripted(monkeypatch):
    """A function that makes a model whose verification at temperature 0 emits given blocks."""

    def make(*blocks):
        remaining = iter(blocks)

        def verify(tree, logits, at_once):
            block, steps = next(remaining), tree.max_levels + 1
            tokens = torch.tensor(block + [0] * (steps - len(block)))
            path = torch.arange(steps).clamp_max(tree.tokens.numel() - 1)
            return VerifyResult(path, tokens, torch.tensor(len(block)), torch.tensor(True))

        monkeypatch.setattr(cycle, "verify_greedily", verify)
        return tiny_pair(depth=3)

    return make


def test_a_stop_token_at_second_place_of_a_block_of_four_ends_the_output_there(scripted):
    model = scripted([4, 9, 5, 6])
    result = model.generate(PROMPT, model.options(max_new_tokens=30, stop_token_ids=(9,)))
    assert result.output_ids[0, -2:].tolist() == [4, 9]
    assert result.new_tokens == 3  # the token of the prefill, then two of the block
    assert result.accept_lengths == [4]  # what verification accepted


@pytest.mark.parametrize(
    "cap, stop, reason, kept",
    [(3, 9, "stop", [4, 9]), (2, 9, "length", [4]), (3, 5, "length", [4, 9])],
)
def test_of_cap_and_stop_token_in_one_block_the_first_decides(scripted, cap, stop, reason, kept):
    model = scripted([4, 9, 5, 6])
    result = model.generate(PROMPT, model.options(max_new_tokens=cap, stop_token_ids=(stop,)))
    assert result.stop_reason == reason
    assert result.output_ids[0, PROMPT.numel() + 1 :].tolist() == kept


def test_cycles_that_accept_3_0_2_give_tau_8_over_3_and_idx_2(scripted):
    model = scripted([1, 2, 3, 4], [5], [6, 7, 8])
    result = model.generate(PROMPT, model.options(max_new_tokens=9))
    assert result.accept_lengths == [4, 1, 3] and result.cycles - 1 == 2
    assert sum(result.accept_lengths) / result.cycles == pytest.approx(8 / 3)


def test_a_rejected_stop_token_does_not_end_the_output(monkeypatch):
    model = tiny_pair(total_token=8, depth=1)
    plain = model.naivegenerate(PROMPT, max_new_tokens=30)[0].tolist()
    stop = next(token for token in range(32) if token not in plain[PROMPT.numel() :])
    logits = model.draft.logits
    bonus = 100.0 * torch.nn.functional.one_hot(torch.tensor(stop), 32)
    # The stop token is first in every pool.
    monkeypatch.setattr(model.draft, "logits", lambda hidden: logits(hidden) + bonus)
    result = model.eagenerate(PROMPT, max_new_tokens=30, stop_token_ids=(stop,))
    assert result[0].tolist() == plain


def test_stop_tokens_come_from_the_generation_config_and_the_template():
    target, tokenizer = tiny_target(), tiny_tokenizer()
    target.generation_config.eos_token_id = [3, 7]
    assert stop_token_ids(target, None) == {3, 7}
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert stop_token_ids(target, tokenizer) == {3, 7, tokenizer.eos_token_id, end}


@over_samplings
def test_same_seed_gives_same_tokens_and_20_seeds_give_more_than_one_output(model, sampling):
    def run(seed):
        options = {"temperature": 1.0, "max_new_tokens": 12, "seed": seed} | sampling
        return tuple(model.eagenerate(PROMPT, **options)[0].tolist())

    first = run(7)
    torch.manual_seed(123)  # global generators change nothing
    assert run(7) == first
    assert len({run(seed) for seed in range(20)}) > 1


def test_a_second_request_equals_the_first_of_a_fresh_object():
    used, fresh = tiny_pair(), tiny_pair()
    long_prompt = torch.randint(32, (1, 60), generator=torch.Generator().manual_seed(0))
    for sampling in SAMPLINGS.values():
        used.eagenerate(long_prompt, temperature=1.0, max_new_tokens=30, **sampling)
        options = {"temperature": 1.0, "max_new_tokens": 20, "seed": 1} | sampling
        again = used.eagenerate(PROMPT, **options)
        assert again.tolist() == fresh.eagenerate(PROMPT, **options).tolist()


def test_a_random_head_or_one_beyond_its_positions_costs_tau_not_correctness():
    target = tiny_target()
    for head in (tiny_head(target, seed=9), tiny_head(target, seed=9, max_position_embeddings=8)):
        model = EaModel(target, head, total_token=8, depth=2, top_k=3)
        result = model.generate(PROMPT, model.options(max_new_tokens=40, sampling="rheo"))
        assert result.output_ids.tolist() == model.naivegenerate(PROMPT, max_new_tokens=40).tolist()
        assert sum(result.accept_lengths) / result.cycles < 2


def test_a_head_that_emits_nan_costs_tau_not_correctness():
    target = tiny_target()
    head = tiny_head(target)
    head.lm_head.weight.data[3] = torch.nan
    head.lm_head.weight.data[4] = torch.inf
    model = EaModel(target, head, total_token=8, depth=2, top_k=3)
    for sampling in SAMPLINGS.values():
        assert_decodes_as_plainly(model, PROMPT, 20, sampling)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@over_samplings
def test_non_finite_target_logits_stop_with_an_error_that_names_the_dtype(value, sampling):
    model = tiny_pair()
    forward, calls = model.base_model.forward, []

    def poisoned(*args, **kwargs):
        output = forward(*args, **kwargs)
        calls.append(1)
        if len(calls) == 3:
            output.logits[..., 5] = value
        return output

    poisoned.__signature__ = inspect.signature(forward)
    model.base_model.forward = poisoned
    options = model.options(temperature=1.0, max_new_tokens=50, **sampling)
    cycles = 0
    with pytest.raises(NonFiniteLogits, match="float32.*bf16"):
        for _ in model.stream(PROMPT, options):
            cycles += 1
    assert cycles == 1  # nothing of the second cycle, which met the value


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_beyond_float16_are_an_error_there_and_pass_in_bfloat16(dtype):
    target = tiny_target()
    weight = target.lm_head.weight.data
    weight.mul_(1e5 / weight.abs().max()).clamp_(-6e4, 6e4)
    head = tiny_head(target)
    model = EaModel(target.to(dtype), head.to(dtype), total_token=8, depth=1, top_k=3)
    if dtype == torch.float16:
        with pytest.raises(NonFiniteLogits, match="float16.*bf16"):
            model.eagenerate(PROMPT, max_new_tokens=10)
    else:
        ids = model.eagenerate(PROMPT, max_new_tokens=10, temperature=1.0, sampling="rheo")
        assert ids.shape[1] == PROMPT.shape[1] + 10


def test_streaming_yields_once_a_cycle_and_ends_with_the_whole(model):
    options = {"temperature": 1.0, "max_new_tokens": 25, "sampling": "rheo", "seed": 2}
    whole, _, idx = model.eagenerate(PROMPT, log=True, **options)
    parts = [ids[0].tolist() for ids in model.ea_generate(PROMPT, **options)]
    assert len(parts) == idx + 1
    for before, after in zip(parts, parts[1:]):
        assert after[: len(before)] == before and len(after) > len(before)
    assert parts[-1] == whole[0].tolist()
    assert [p.tolist() for p in model.ea_generate(PROMPT, max_new_tokens=0)] == [PROMPT.tolist()]
    *_, last = model.naive_generate(PROMPT, max_new_tokens=5)
    assert last.tolist() == model.naivegenerate(PROMPT, max_new_tokens=5).tolist()


@pytest.mark.parametrize(
    "rheo, pool",
    [
        ({}, {"lead"}),
        ({"sampling": "rheo", "m": 0}, {"sampled", "fill"}),
        ({"sampling": "rheo", "m": 1}, {"lead", "sampled", "fill"}),
        ({"sampling": "rheo", "m": 3}, {"lead", "sampled"}),
    ],
    ids=["topk", "rheo-0", "rheo-1", "rheo-3"],
)
def test_tried_children_are_the_children_of_the_visited_nodes(model, monkeypatch, rheo, pool):
    cycles = []

    def record(tree, verified):
        cycles.append((tree, verified))
        return summarise(tree, verified)

    monkeypatch.setattr(decoding, "summarise", record)
    result = model.generate(PROMPT, model.options(temperature=1.0, max_new_tokens=40, **rheo))
    for (tree, verified), tried in zip(cycles, result.tried, strict=True):
        path = verified.path[: verified.count].tolist()
        scores = tree.log_scores.double()
        expected = []
        for node in path:
            children = tree.children(node).nonzero()[:, 0].tolist()
            kinds = [KIND_NAMES[tree.kinds[child]] for child in children]
            proxies = [(scores[child] - scores[node]).exp().item() for child in children]
            accepted = [child in path for child in children]
            if children:
                expected.append(list(zip(kinds, map(pytest.approx, proxies), accepted)))
        assert tried == expected
    accepted = [
        [slot.kind for children in tried for slot in children if slot.accepted]
        for tried in result.tried
    ]
    assert accepted == result.accepted_kinds
    seen = {slot.kind for tried in result.tried for children in tried for slot in children}
    assert seen == pool


def test_padding_is_no_nodes_child():
    """Nodes that do not exist have the root as parent, and no kind."""
    ids, scores = torch.arange(6), torch.tensor([1.0, 0.5, 0.25, 0.125, 0.0, 0.0]).log()
    tree = Tree(
        tokens=ids,
        parents=torch.tensor([0, 0, 0, 1, 0, 0]),
        levels=ids,
        kinds=torch.tensor([-1, 0, 1, 2, -1, -1]),
        valid=scores > -torch.inf,
        log_scores=scores,
        mask=torch.eye(6) > 0,
        pool_rows=ids * 0,
        tail=ids[None],
        q_tail=torch.zeros(1, 1),
        max_levels=2,
    )
    verified = VerifyResult(
        path=torch.tensor([0, 1, 3]),
        tokens=torch.tensor([1, 3, 9]),
        count=torch.tensor(3),
        finite=torch.tensor(True),
    )
    outcome = cycle.to_cpu(summarise(tree, verified), 6)
    assert outcome.tokens == [1, 3, 9] and outcome.kinds == ["lead", "fill"] and outcome.finite
    half, quarter = pytest.approx(0.5), pytest.approx(0.25)
    roots_children = [("lead", half, True), ("sampled", quarter, False)]
    assert outcome.tried == [roots_children, [("fill", quarter, True)]]


def test_the_parts_of_a_result_agree(model):
    options = model.options(temperature=1.0, max_new_tokens=40, sampling="rheo")
    result = model.generate(PROMPT, options)
    assert 1 + sum(result.accept_lengths) >= result.new_tokens == 40
    assert [len(kinds) + 1 for kinds in result.accepted_kinds] == result.accept_lengths
    assert {kind for kinds in result.accepted_kinds for kind in kinds} <= set(KIND_NAMES)
    assert len(result.tried) == result.cycles
    assert set(result.seconds) == {"prefill", "draft", "verify", "commit"}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"m": 1}, "m=1 belongs to sampling 'rheo'"),
        ({"support": 8}, "support=8 belongs to"),
        ({"verification": "rrsw"}, "verification='rrsw' belongs to"),
        ({"sampling": "beam"}, "sampling is 'beam'; choose one of topk, rheo"),
        ({"sampling": "rheo", "m": 4}, "m is 4; with top_k 4 it must lie in 0..3"),
        ({"sampling": "rheo", "m": -1}, "m is -1"),
        ({"sampling": "rheo", "support": -2}, "support is -2"),
        (
            {"sampling": "rheo", "verification": "x"},
            "verification is 'x'; choose one of rheo, rrsw",
        ),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -3}, "top_k .filter. is -3"),
        ({"total_token": 1}, "total_token is 1"),
        ({"depth": -1}, "depth is -1"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
    ],
)
def test_bad_options_are_errors_that_quote_the_value(model, options, message):
    with pytest.raises(ValueError, match=message):
        model.eagenerate(PROMPT, **options)


@pytest.mark.parametrize(
    "prompt, message",
    [
        (torch.zeros(2, 3, dtype=torch.long), "batch of 2"),
        (torch.zeros(1, 0, dtype=torch.long), "empty"),
        (torch.tensor([[32]]), "outside the target's vocabulary 0..31"),
    ],
)
def test_bad_prompts_are_errors(model, prompt, message):
    with pytest.raises(ValueError, match=message):
        model.eagenerate(prompt)


@over_samplings
def test_a_draft_vocabulary_smaller_than_the_pool_decodes(sampling):
    model = tiny_pair(draft_vocab=3, top_k=10, depth=7, total_token=2)
    assert_decodes_as_plainly(model, PROMPT, 8, sampling)


@over_samplings
def test_a_prompt_of_one_token_decodes(model, sampling):
    assert_decodes_as_plainly(model, torch.tensor([[4]]), 8, sampling)


def test_eagles_calls_work_by_position():
    model = tiny_pair().eval()
    ids, _, _ = model.eagenerate(PROMPT, 0.0, 0.0, 0, 12, 2048, True, False)
    *_, streamed = model.ea_generate(PROMPT, 0.0, 0.0, 0, 12, 2048, False, False)
    assert streamed.tolist() == ids.tolist()
    *_, plain = model.naive_generate(PROMPT, 0.0, 0.0, 0, 12)
    assert plain.tolist() == ids.tolist()
    ids.add_(0)  # the caller may change the result: it is no tensor of inference mode
    with pytest.raises(ValueError, match="threshold is 0.5"):
        EaModel.from_pretrained("x", "y", threshold=0.5)


def test_defaults_are_the_papers_tree():
    options = DecodingOptions(sampling="rheo")
    assert (options.total_token, options.depth, options.tree_top_k) == (60, 7, 10)
    assert (options.tree.pool.m, options.tree.pool.support) == (1, 128)


@pytest.mark.parametrize("step", [9, 64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "sampling",
    [
        {"sampling": "none"},
        {"sampling": "topk"},
        {"sampling": "rheo", "m": 1},
        {"sampling": "rheo", "m": 0, "verification": "rrsw"},
    ],
    ids=["plain", "topk", "rheo-1", "rrsw-0"],
)
def test_graphed_cycles_give_the_same_tokens(sampling, temperature, step, monkeypatch):
    """The cycles that CUDA graphs replay, run without graphs; one cycle serves all requests.

    Their blocks begin at multiples of the step, lengths are tensors, and they commit without
    knowing how many tokens.
    """
    shapes = []
    graph = cuda_graph.GraphedCycle.graph

    def record(self):
        shapes.append(self.cycle.cache.first.start)
        return graph(self)

    monkeypatch.setattr(cuda_graph, "STEP", step)
    monkeypatch.setattr(cuda_graph.GraphedCycle, "graph", record)
    model, graphs = tiny_pair(depth=3, draft_vocab=24), cuda_graph.Graphs()
    requests = (PROMPT, 40), (PROMPT.repeat(1, 4), 40), (PROMPT[:, :2], 9)
    for seed, (prompt, new) in enumerate(requests):
        options = model.options(temperature=temperature, max_new_tokens=new, seed=seed, **sampling)
        *_, usual = decode(model.target, model.draft, prompt, options)
        *_, graphed = decode(model.target, model.draft, prompt, options, graphs=graphs)
        assert graphed.token_ids == usual.token_ids
        assert graphed.accept_lengths == usual.accept_lengths
        assert graphed.accepted_kinds == usual.accepted_kinds
        # Another number of masked keys rounds float32 sums differently, hence the tolerance.
        expected = [
            [
                [(slot.kind, pytest.approx(slot.proxy, rel=1e-3), slot.accepted) for slot in slots]
                for slots in tried
            ]
            for tried in usual.tried
        ]
        assert graphed.tried == expected
    # No request is longer than 64 positions, so that few graphs are enough.
    assert len(graphs.kept) == 1 and len(set(shapes)) <= 64 // step + 2


@pytest.fixture
def graphed():
    """A model, graphs for it, and a function that starts a request with them."""
    model, graphs = tiny_pair(depth=2), cuda_graph.Graphs(most=2)

    def start(new=30, temperature=1.0):
        options = model.options(temperature=temperature, max_new_tokens=new)
        return decode(model.target, model.draft, PROMPT, options, graphs=graphs)

    return model, graphs, start


def test_requests_at_the_same_time_do_not_share_a_cycle(graphed):
    model, graphs, start = graphed
    expected = model.generate(PROMPT, model.options(temperature=1.0, max_new_tokens=30)).token_ids
    for first, second in zip(start(), start()):
        assert first.token_ids == second.token_ids
    assert first.token_ids == expected and len(graphs.kept) == 1


def test_a_cycle_serves_on_after_a_request_that_was_stopped_early(graphed):
    model, graphs, start = graphed
    expected = model.generate(PROMPT, model.options(temperature=1.0, max_new_tokens=30)).token_ids
    next(start())
    kept = list(graphs.kept.values())
    assert len(kept) == 1
    *_, result = start()
    assert result.token_ids == expected
    assert list(graphs.kept.values()) == kept


def test_no_more_cycles_are_kept_than_asked_for(graphed):
    _, graphs, start = graphed
    for temperature in (1.0, 0.5, 0.6, 0.7):
        list(start(temperature=temperature))
    assert len(graphs.kept) == 2


def test_a_cycle_that_met_broken_logits_is_not_used_again(graphed):
    model, graphs, start = graphed
    cycles = start()
    next(cycles)
    model.base_model.lm_head.bias = torch.nn.Parameter(torch.full((32,), torch.nan))
    with pytest.raises(NonFiniteLogits):
        next(cycles)
    assert not graphs.kept
