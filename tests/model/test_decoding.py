"""The loop and the calls: caps, stops, seeds, streaming, results."""

import pytest
import torch
from support.tiny import PROMPT, tiny_head, tiny_pair, tiny_target, tiny_tokenizer

import eagle.model.cuda_graph as cuda_graph
import eagle.model.cycle as cycle
import eagle.model.decoding as decoding
from eagle.model.cycle import NonFiniteLogits, summarise
from eagle.model.decoding import decode
from eagle.model.ea_model import EaModel
from eagle.model.options import DecodingOptions
from eagle.model.tokens import stop_token_ids
from rheo import KIND_NAMES, Tree, VerifyResult

EVERY_SAMPLING = [
    {"sampling": "none"},
    {"sampling": "topk"},
    {"sampling": "rheo", "m": 0},
    {"sampling": "rheo", "verification": "rrsw"},
]


@pytest.fixture(scope="module")
def model():
    return tiny_pair()


@pytest.mark.parametrize("kwargs", EVERY_SAMPLING)
@pytest.mark.parametrize("cap", [0, 1, 2, 7, 23])
def test_law8_cap_on_new_tokens_is_exact(model, cap, kwargs):
    ids, new_token, idx = model.eagenerate(
        PROMPT, temperature=1.0, max_new_tokens=cap, log=True, **kwargs
    )
    assert ids.shape == (1, PROMPT.numel() + cap) and new_token == cap
    assert (idx == -1) == (cap < 2)


def test_max_length_counts_the_prompt_and_a_longer_prompt_is_an_error(model):
    assert model.eagenerate(PROMPT, max_length=10).shape[1] == 10
    assert model.eagenerate(PROMPT, max_length=6).shape[1] == 6
    with pytest.raises(ValueError, match="prompt has 6 tokens and max_length is 5"):
        model.eagenerate(PROMPT, max_length=5)


@pytest.mark.parametrize("kwargs", EVERY_SAMPLING)
def test_law8_output_ends_at_the_first_stop_token_also_inside_a_block(model, kwargs):
    free = model.generate(
        PROMPT, model.options(temperature=1.0, max_new_tokens=40, seed=3, **kwargs)
    )
    new = free.output_ids[0, PROMPT.numel() :].tolist()
    for stop in set(new):
        position = new.index(stop)
        result = model.generate(
            PROMPT,
            model.options(
                temperature=1.0, max_new_tokens=40, seed=3, stop_token_ids=(stop,), **kwargs
            ),
        )
        assert result.output_ids[0, PROMPT.numel() :].tolist() == new[: position + 1]
        assert result.new_tokens == position + 1 and result.stop_reason == "stop"


def scripted(monkeypatch, model, blocks):
    """Let verification at temperature 0 emit the given blocks of tokens, whatever the tree."""
    rounds = iter(blocks)

    def fake(tree, logits, at_once):
        block = next(rounds)
        steps = tree.max_levels + 1
        tokens = torch.tensor(block + [0] * (steps - len(block)))
        path = torch.arange(steps).clamp_max(tree.tokens.numel() - 1)
        return VerifyResult(path, tokens, torch.tensor(len(block)), torch.tensor(True))

    monkeypatch.setattr(cycle, "verify_greedily", fake)
    return model


def test_law8_stop_token_second_in_a_block_of_four_ends_there(monkeypatch):
    model = scripted(monkeypatch, tiny_pair(depth=3), [[4, 9, 5, 6]])
    result = model.generate(PROMPT, model.options(max_new_tokens=30, stop_token_ids=(9,)))
    assert result.output_ids[0, -2:].tolist() == [4, 9]
    assert result.new_tokens == 3  # the prefill's token, then two of the block
    assert result.accept_lengths == [4]  # what verification accepted


@pytest.mark.parametrize(
    "cap, stop, reason, kept",
    [(3, 9, "stop", [4, 9]), (2, 9, "length", [4]), (3, 5, "length", [4, 9])],
)
def test_law8_cap_and_stop_in_one_block_whichever_comes_first_decides(
    monkeypatch, cap, stop, reason, kept
):
    model = scripted(monkeypatch, tiny_pair(depth=3), [[4, 9, 5, 6]])
    result = model.generate(PROMPT, model.options(max_new_tokens=cap, stop_token_ids=(stop,)))
    assert (
        result.stop_reason == reason and result.output_ids[0, PROMPT.numel() + 1 :].tolist() == kept
    )


def test_cycles_that_accept_3_0_2_give_tau_8_over_3_and_idx_2(monkeypatch):
    model = scripted(monkeypatch, tiny_pair(depth=3), [[1, 2, 3, 4], [5], [6, 7, 8]])
    result = model.generate(PROMPT, model.options(max_new_tokens=9))
    assert result.accept_lengths == [4, 1, 3] and result.cycles - 1 == 2
    assert sum(result.accept_lengths) / result.cycles == pytest.approx(8 / 3)


def test_law8_rejected_stop_token_does_not_end_the_text(monkeypatch):
    model = tiny_pair(total_token=8, depth=1)
    plain = model.naivegenerate(PROMPT, max_new_tokens=30)
    stop = next(token for token in range(32) if token not in plain[0, PROMPT.numel() :].tolist())
    logits = model.draft.logits
    bonus = (
        torch.nn.functional.one_hot(torch.tensor(stop), 32) * 100.0
    )  # every pool leads with the stop token
    monkeypatch.setattr(model.draft, "logits", lambda hidden: logits(hidden) + bonus)
    assert (
        model.eagenerate(PROMPT, max_new_tokens=30, stop_token_ids=(stop,)).tolist()
        == plain.tolist()
    )


def test_stop_set_joins_generation_config_and_template():
    target = tiny_target()
    target.generation_config.eos_token_id = [3, 7]
    tokenizer = tiny_tokenizer()
    assert stop_token_ids(target, None) == {3, 7}
    assert stop_token_ids(target, tokenizer) == {
        3,
        7,
        tokenizer.eos_token_id,
        tokenizer.convert_tokens_to_ids("<|end|>"),
    }


@pytest.mark.parametrize("kwargs", EVERY_SAMPLING)
def test_law9_same_seed_same_tokens_and_20_seeds_give_more_than_one_output(model, kwargs):
    def run(seed):
        return tuple(
            model.eagenerate(PROMPT, temperature=1.0, max_new_tokens=12, seed=seed, **kwargs)[
                0
            ].tolist()
        )

    first = run(7)
    torch.manual_seed(123)  # global generators have no say
    assert run(7) == first
    assert len({run(seed) for seed in range(20)}) > 1


def test_law10_a_second_request_equals_the_first_of_a_fresh_object():
    used, fresh = tiny_pair(), tiny_pair()
    long_prompt = torch.randint(32, (1, 60), generator=torch.Generator().manual_seed(0))
    for kwargs in EVERY_SAMPLING:
        used.eagenerate(long_prompt, temperature=1.0, max_new_tokens=30, **kwargs)
        again = used.eagenerate(PROMPT, temperature=1.0, max_new_tokens=20, seed=1, **kwargs)
        assert (
            again.tolist()
            == fresh.eagenerate(
                PROMPT, temperature=1.0, max_new_tokens=20, seed=1, **kwargs
            ).tolist()
        )


def test_law11_a_random_head_or_one_beyond_its_positions_costs_tau_not_correctness():
    target = tiny_target()
    for head in (tiny_head(target, seed=9), tiny_head(target, seed=9, max_position_embeddings=8)):
        model = EaModel(target, head, total_token=8, depth=2, top_k=3)
        result = model.generate(PROMPT, model.options(max_new_tokens=40, sampling="rheo"))
        assert result.output_ids.tolist() == model.naivegenerate(PROMPT, max_new_tokens=40).tolist()
        assert sum(result.accept_lengths) / result.cycles < 2


def test_law11_a_head_that_emits_nan_costs_tau_not_correctness():
    target = tiny_target()
    head = tiny_head(target)
    head.lm_head.weight.data[3] = torch.nan
    head.lm_head.weight.data[4] = torch.inf
    model = EaModel(target, head, total_token=8, depth=2, top_k=3)
    for kwargs in EVERY_SAMPLING:
        assert (
            model.eagenerate(PROMPT, max_new_tokens=20, **kwargs).tolist()
            == model.naivegenerate(PROMPT, max_new_tokens=20).tolist()
        )


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kwargs", EVERY_SAMPLING)
def test_law7_non_finite_target_logits_stop_with_an_error_that_names_the_dtype(value, kwargs):
    model = tiny_pair()
    forward, calls = model.base_model.forward, []

    def poisoned(*args, **kw):
        output = forward(*args, **kw)
        calls.append(1)
        if len(calls) == 3:
            output.logits[..., 5] = value
        return output

    poisoned.__signature__ = __import__("inspect").signature(forward)
    model.base_model.forward = poisoned
    seen = []
    with pytest.raises(NonFiniteLogits, match="float32.*bf16"):
        for generation in model.stream(
            PROMPT, model.options(temperature=1.0, max_new_tokens=50, **kwargs)
        ):
            seen.append(generation.new_tokens)
    assert len(seen) == 1  # one whole cycle, and nothing of the poisoned one


def test_logits_beyond_float16_are_an_error_there_and_pass_in_bfloat16():
    prompt = PROMPT
    for dtype in (torch.float16, torch.bfloat16):
        target = tiny_target()
        target.lm_head.weight.data.mul_(1e5 / target.lm_head.weight.data.abs().max()).clamp_(
            -6e4, 6e4
        )
        head = tiny_head(target)
        model = EaModel(target.to(dtype), head.to(dtype), total_token=8, depth=1, top_k=3)
        if dtype == torch.float16:
            with pytest.raises(NonFiniteLogits, match="float16.*bf16"):
                model.eagenerate(prompt, max_new_tokens=10)
        else:
            assert (
                model.eagenerate(prompt, max_new_tokens=10, temperature=1.0, sampling="rheo").shape[
                    1
                ]
                == prompt.shape[1] + 10
            )


def test_streaming_yields_once_a_cycle_and_ends_with_the_whole(model):
    kwargs = {"temperature": 1.0, "max_new_tokens": 25, "sampling": "rheo", "seed": 2}
    whole, _, idx = model.eagenerate(PROMPT, log=True, **kwargs)
    parts = list(model.ea_generate(PROMPT, **kwargs))
    assert len(parts) == idx + 1
    for before, after in zip(parts, parts[1:]):
        assert (
            after[0, : before.shape[1]].tolist() == before[0].tolist()
            and after.shape[1] > before.shape[1]
        )
    assert parts[-1].tolist() == whole.tolist()
    assert [p.tolist() for p in model.ea_generate(PROMPT, max_new_tokens=0)] == [PROMPT.tolist()]
    assert (
        list(model.naive_generate(PROMPT, max_new_tokens=5))[-1].tolist()
        == model.naivegenerate(PROMPT, max_new_tokens=5).tolist()
    )


def test_families_are_the_children_of_the_visited_nodes(model, monkeypatch):
    trees = []
    monkeypatch.setattr(
        decoding,
        "summarise",
        lambda tree, verified: trees.append((tree, verified)) or summarise(tree, verified),
    )
    seen = set()
    for m in (None, 0, 1, 3):
        trees.clear()
        rheo = {} if m is None else {"sampling": "rheo", "m": m}
        result = model.generate(PROMPT, model.options(temperature=1.0, max_new_tokens=40, **rheo))
        for (tree, verified), tried in zip(trees, result.tried, strict=True):
            path, expected = verified.path[: verified.count].tolist(), []
            for node in path:
                children = tree.children(node).nonzero()[:, 0].tolist()
                proxies = [
                    (tree.log_scores[c].double() - tree.log_scores[node].double()).exp().item()
                    for c in children
                ]
                slots = [
                    (KIND_NAMES[tree.kinds[c]], pytest.approx(proxy), c in path)
                    for c, proxy in zip(children, proxies)
                ]
                expected += [slots] if slots else []
            assert tried == expected
            seen |= {slot.kind for family in tried for slot in family}
            if m is None:
                assert {slot.kind for family in tried for slot in family} <= {"lead"}
        accepted = [
            [slot.kind for family in tried for slot in family if slot.accepted]
            for tried in result.tried
        ]
        assert accepted == result.accepted_kinds
    assert seen == set(KIND_NAMES)


def test_padding_is_nobodys_child():
    """Nodes that do not exist have the root as parent, and no kind."""
    parents, kinds = torch.tensor([0, 0, 0, 1, 0, 0]), torch.tensor([-1, 0, 1, 2, -1, -1])
    scores = torch.tensor([1.0, 0.5, 0.25, 0.125, 0.0, 0.0]).log()
    valid = scores > -torch.inf
    ids, nothing = torch.arange(6), torch.zeros(1, 1)
    tree = Tree(
        ids,
        parents,
        ids,
        kinds,
        valid,
        scores,
        torch.eye(6) > 0,
        ids * 0,
        ids[None],
        nothing,
        max_levels=2,
    )
    verified = VerifyResult(
        torch.tensor([0, 1, 3]), torch.tensor([1, 3, 9]), torch.tensor(3), torch.tensor(True)
    )
    outcome = cycle.to_cpu(summarise(tree, verified), 6)
    assert outcome.tokens == [1, 3, 9] and outcome.kinds == ["lead", "fill"] and outcome.finite
    assert outcome.tried == [
        [("lead", pytest.approx(0.5), True), ("sampled", pytest.approx(0.25), False)], [("fill", pytest.approx(0.25), True)]
    ]  # fmt: skip


def test_the_rich_result_adds_up(model):
    result = model.generate(
        PROMPT, model.options(temperature=1.0, max_new_tokens=40, sampling="rheo")
    )
    assert 1 + sum(result.accept_lengths) >= result.new_tokens == 40
    assert [len(kinds) + 1 for kinds in result.accepted_kinds] == result.accept_lengths
    assert {kind for kinds in result.accepted_kinds for kind in kinds} <= {
        "lead",
        "sampled",
        "fill",
    }
    assert len(result.tried) == result.cycles
    assert set(result.seconds) == {"prefill", "draft", "verify", "commit"}


@pytest.mark.parametrize(
    "kwargs, message",
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
def test_bad_options_are_errors_that_quote_the_value(model, kwargs, message):
    with pytest.raises(ValueError, match=message):
        model.eagenerate(PROMPT, **kwargs)


def test_bad_prompts_are_errors(model):
    for prompt, message in (
        (torch.zeros(2, 3, dtype=torch.long), "batch of 2"),
        (torch.zeros(1, 0, dtype=torch.long), "empty"),
        (torch.tensor([[32]]), "outside the target's vocabulary 0..31"),
    ):
        with pytest.raises(ValueError, match=message):
            model.eagenerate(prompt)


def test_draft_vocabulary_smaller_than_the_pool_decodes():
    model = tiny_pair(draft_vocab=3, top_k=10, depth=7, total_token=2)
    for kwargs in EVERY_SAMPLING:
        assert (
            model.eagenerate(PROMPT, max_new_tokens=8, **kwargs).tolist()
            == model.naivegenerate(PROMPT, max_new_tokens=8).tolist()
        )


def test_a_prompt_of_one_token_decodes():
    model = tiny_pair()
    prompt = torch.tensor([[4]])
    for kwargs in EVERY_SAMPLING:
        assert (
            model.eagenerate(prompt, max_new_tokens=8, **kwargs).tolist()
            == model.naivegenerate(prompt, max_new_tokens=8).tolist()
        )


def test_eagles_calls_work_by_position():
    model = tiny_pair().eval()
    ids, _, _ = model.eagenerate(PROMPT, 0.0, 0.0, 0, 12, 2048, True, False)
    assert (
        list(model.ea_generate(PROMPT, 0.0, 0.0, 0, 12, 2048, False, False))[-1].tolist()
        == ids.tolist()
    )
    assert list(model.naive_generate(PROMPT, 0.0, 0.0, 0, 12))[-1].tolist() == ids.tolist()
    ids.add_(0)  # the caller's own tensor, not one of inference mode
    with pytest.raises(ValueError, match="threshold is 0.5"):
        EaModel.from_pretrained("x", "y", threshold=0.5)


def test_defaults_are_the_papers_tree():
    options = DecodingOptions(sampling="rheo")
    assert (options.total_token, options.depth, options.tree_top_k) == (60, 7, 10)
    assert (options.tree.pool.m, options.tree.pool.support) == (1, 128)


SAMPLINGS = [
    {"sampling": "none"},
    {"sampling": "topk"},
    {"sampling": "rheo", "m": 1},
    {"sampling": "rheo", "m": 0, "verification": "rrsw"},
]


@pytest.mark.parametrize("step", [9, 64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_cycles_of_fixed_shape_that_wait_for_nothing_give_the_same_tokens(
    sampling, temperature, step, monkeypatch
):
    """What a CUDA graph replays, run as it is: blocks at multiples of the step, lengths as tensors, commits of unknown length; one cycle for all requests."""
    monkeypatch.setattr(cuda_graph, "STEP", step)
    model, graphs, shapes = tiny_pair(depth=3, draft_vocab=24), cuda_graph.Graphs(), []
    graph = cuda_graph.GraphedCycle.graph
    monkeypatch.setattr(
        cuda_graph.GraphedCycle,
        "graph",
        lambda self: shapes.append(self.cycle.cache.first.start) or graph(self),
    )
    for seed, (prompt, new) in enumerate(
        ((PROMPT, 40), (PROMPT.repeat(1, 4), 40), (PROMPT[:, :2], 9))
    ):
        options = model.options(temperature=temperature, max_new_tokens=new, seed=seed, **sampling)
        usual, fixed = (
            list(decode(model.target, model.draft, prompt, options, graphs=g))[-1]
            for g in (None, graphs)
        )
        assert fixed.token_ids == usual.token_ids and fixed.accept_lengths == usual.accept_lengths
        assert fixed.accepted_kinds == usual.accepted_kinds
        # Masked keys more or fewer round differently: float32 scores of a few levels.
        slots = [
            [(s.kind, pytest.approx(s.proxy, rel=1e-3), s.accepted) for f in tried for s in f]
            for tried in usual.tried
        ]
        assert [[slot for family in tried for slot in family] for tried in fixed.tried] == slots
    assert (
        len(graphs.kept) == 1 and len(set(shapes)) <= 64 // step + 2
    )  # at most 64 positions, so few graphs would do


def test_requests_at_the_same_time_do_not_share_a_cycle():
    model, graphs = tiny_pair(depth=2), cuda_graph.Graphs(most=2)
    options = model.options(temperature=1.0, max_new_tokens=30)
    expected = model.generate(PROMPT, options).token_ids
    first, second = (
        decode(model.target, model.draft, PROMPT, options, graphs=graphs) for _ in range(2)
    )
    for a, b in zip(first, second):
        assert a.token_ids == b.token_ids
    assert a.token_ids == expected and len(graphs.kept) == 1
    next(
        decode(model.target, model.draft, PROMPT, options, graphs=graphs)
    )  # given up after a cycle
    assert (
        list(decode(model.target, model.draft, PROMPT, options, graphs=graphs))[-1].token_ids
        == expected
    )
    for temperature in (0.5, 0.6, 0.7):
        list(
            decode(
                model.target,
                model.draft,
                PROMPT,
                model.options(temperature=temperature),
                graphs=graphs,
            )
        )
    assert len(graphs.kept) == 2


def test_a_cycle_that_met_broken_logits_is_not_used_again():
    model, graphs = tiny_pair(depth=2), cuda_graph.Graphs()
    options = model.options(temperature=1.0, max_new_tokens=30)
    stream = decode(model.target, model.draft, PROMPT, options, graphs=graphs)
    next(stream)
    bias = torch.nn.Parameter(torch.full((32,), torch.nan))
    model.base_model.lm_head.bias = bias
    with pytest.raises(NonFiniteLogits):
        next(stream)
    model.base_model.lm_head.bias = None
    assert not graphs.kept
