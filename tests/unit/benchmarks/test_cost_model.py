"""The cost model against points that it was not fitted to, at a tiny size."""

TINY = ["--nodes", 120, "--features", 4, "--batch", 8, "--layers", 2, "--sampled", 4, "--tokens", 8, "--repeats", 3]
TINY += ["--batches", 2, 4, "--depths", 1, 2, 3, 4, "--heads", 2, "--hidden", 8, "--microbatches", 2, 4, "--plans", 2]
TINY += ["--heldout-batches", 3, "--heldout-depths", 5, 6, "--heldout-heads", 2, "--heldout-hidden", 8, 16]


def test_the_cost_model_is_held_against_what_it_has_not_seen(script):
    body = script("cost_model", *TINY, "--ranks", 1)
    assert [row["ranks"] for row in body["rows"]] == [1]
    for row in body["rows"]:
        quality = row["quality"]
        assert {"memory", "latency", "heldout_memory", "heldout_latency", "heldout_layer"} < set(quality)
        assert quality["heldout_latency"]["num_points"] == 4
        assert quality["heldout_memory/depth+width+batch"]["held_out"] is True
        assert quality["plans_memory"]["num_points"] == quality["plans_latency"]["num_points"] >= 1
        assert quality["heldout_memory"]["false_feasible_percent"] is not None
        assert row["margin"] >= 1
        for name, targets in row["targets"].items():
            for key, one in targets.items():
                assert one["measured"] == quality[name][key]
                better = one["measured"] >= one["target"] if key == "r2" else one["measured"] <= one["target"]
                assert one["holds"] == better
