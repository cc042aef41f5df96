"""Two ranks beside one, on gloo."""

import pytest


@pytest.mark.distributed
def test_layouts_set_two_ranks_beside_one(script):
    sizes = ["--batch", 16, "--microbatches", 2, "--sampled", 4, "--tokens", 40, "--supers", 3, "--nodes", 150]
    body = script(
        "layouts", "--layers", 2, "--heads", 2, "--hidden", 8, "--cp-layers", 1, *sizes, "--rounds", 1, "--steps", 1
    )
    cases = {case["case"]: case for case in body["cases"]}
    assert {name: (case["layout"], case["batch"], case["tokens"]) for name, case in cases.items()} == {
        "dp2": ("pp1[2] cp1 dp2 k1", 16, 7),
        "cp2": ("pp1[1] cp2 dp1 k1", 1, 40),
        "pp2": ("pp2[1,1] cp1 dp1 k2", 16, 7),
    }
    # 36 regular tokens are shared, 3 super nodes and the global token are on both ranks.
    assert cases["cp2"]["local_tokens"] == [22, 22]
    assert (cases["dp2"]["attention"], cases["cp2"]["attention"]) == ("tiled", "ring")
    for case in cases.values():
        one, two = case["peak_bytes_one"], case["peak_bytes_two"]
        assert len(two) == 2 and case["memory"] == max(two) / one
        rounds = {(row["setting"], row["rank"]): row["seconds"] for row in case["rounds"]}
        alone, apart, together = (
            max(rounds[setting, rank] for rank in (0, 1) if (setting, rank) in rounds)
            for setting in ("alone", "apart", "together")
        )
        # Apart, each of the two does the work of one: twice the work in that time.
        assert (case["speedup"], case["machine"]) == (alone / together, 2 * (alone / apart))
    assert cases["cp2"]["memory"] < 1
