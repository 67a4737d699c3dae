"""Pairwise testing: every two values that may meet do, in few cases."""

import itertools

from tests.support.pairs import case_id, pairs, pairwise

OPTIONS = {"a": (1, 2, 3), "b": ("x", "y", None), "c": ((0, 1), (2, 3)), "d": (True, False)}


def allowed(case):
    return not (case["a"] == 1 and case["b"] == "x") and (case["c"] == (0, 1) or case["d"])


def test_all_pairs_that_may_meet_do():
    cases = pairwise(OPTIONS, allowed)
    assert all(allowed(case) for case in cases)
    everything = [dict(zip(OPTIONS, values, strict=True)) for values in itertools.product(*OPTIONS.values())]
    assert set().union(*map(pairs, cases)) == set().union(*(pairs(case) for case in everything if allowed(case)))
    assert len(cases) < len(everything) / 2


def test_the_same_options_give_the_same_cases():
    assert pairwise(OPTIONS, allowed) == pairwise(OPTIONS, allowed)
    assert case_id(pairwise(OPTIONS)[0]).count("-") == len(OPTIONS) - 1


def test_attention_has_a_call_for_each_pair_that_te_runs():
    """But for those written down here: what refuses more than it says would leave others out."""
    from tests.gpu.test_attention_pairs import CASES, OPTIONS

    met = set().union(*map(pairs, CASES))
    wanted = {((a, x), (b, y)) for a, b in itertools.combinations(OPTIONS, 2) for x in OPTIONS[a] for y in OPTIONS[b]}
    absent = wanted - met
    # What a packed form or a bias of keys excludes is told by `is_call` and REFUSED, too many pairs to repeat.
    told = [pair for pair in absent if ("bias", "keys") in pair or any(option == "form" for option, _ in pair)]
    others = sorted(absent - set(told), key=str)
    assert others == sorted(
        [
            *(((("mask", mask), ("window", (64, 32)))) for mask in OPTIONS["mask"] if "causal" in mask),
            *(
                ((("mask", mask), ("bias", bias)))
                for mask in OPTIONS["mask"]
                if "bottom_right" in mask
                for bias in OPTIONS["bias"]
                if bias not in (None, "keys")
            ),
            (("mask", "causal_bottom_right"), ("lengths", (1000, 640))),
        ],
        key=str,
    )
