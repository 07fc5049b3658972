"""Decode steps replayed as CUDA graphs: the same logits as step by step from Python, whatever changes in between."""

import copy
import gc

import pytest
import torch
from tiny import GREEDY, build, prompts, relative_error, scores_of, twin

import hf_mla
from hf_mla.decoder import DecoderForward
from hf_mla.graphs import bucket_of, columns_of

cuda = torch.device("cuda")


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (200, 200), (201, 208)])
def test_bucket_of(rows, bucket):
    assert bucket_of(rows) == bucket


@pytest.mark.parametrize(("columns", "bucket"), [(1, 16), (16, 16), (17, 32), (513, 1024)])
def test_columns_of(columns, bucket):
    assert columns_of(columns) == bucket


def gpu_model(family="deepseek_v3", **changes):
    # In fp32 and without experts, so that the two can be compared tightly: rounding can't flip a token.
    sizes = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    sizes["first_k_dense_replace"] = 3
    return build(family, sharp=2.0, **{**sizes, **changes}).to(cuda)


def on_gpu(batch):
    return {name: tensor.to(cuda) for name, tensor in batch.items()}


def generate(model, batch, new, **kwargs):
    return model.generate(**batch, max_new_tokens=new, cache_implementation="paged_mla", **GREEDY, **kwargs)


def graphs_of(model):
    forward = model.model.__dict__["forward"]
    assert isinstance(forward, DecoderForward)
    return [graph for graph in forward.graphs._graphs.values() if graph is not None]


def assert_same(got, expected, tolerance=1e-5):
    errors = [relative_error(a, b) for a, b in zip(got.logits, expected.logits, strict=True)]
    assert max(errors) < tolerance, [f"{error:.1e}" for error in errors]
    assert torch.equal(got.sequences, expected.sequences)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_200_replays_across_block_boundaries_equal_eager(family):
    model = gpu_model(family)
    batch = on_gpu(prompts([13, 40, 16, 31, 64, 63, 1, 70]))
    with hf_mla.patched(model, graphs=False, block_size=16):
        expected = generate(model, batch, 200)
    hf_mla.patch(model, block_size=16)
    got = generate(model, batch, 200)
    assert graphs_of(model)
    assert_same(got, expected, 1e-4)
    assert_same(got, twin_of_stock(model).generate(**batch, max_new_tokens=200, **GREEDY), 1e-4)


def twin_of_stock(model):
    return hf_mla.unpatch(twin(model))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_captured_too(dtype):
    model = gpu_model(first_k_dense_replace=1).to(dtype)
    batch = on_gpu(prompts([13, 40, 16]))
    reference = scores_of(twin_of_stock(model).float().generate(**batch, max_new_tokens=24, **GREEDY))
    stock = scores_of(twin_of_stock(model).generate(**batch, max_new_tokens=24, **GREEDY))
    hf_mla.patch(model)
    got = scores_of(generate(model, batch, 24))
    assert graphs_of(model)
    # The first decode steps, while all three still have the same tokens.
    same = 2
    error = relative_error(got[:, :same], reference[:, :same])
    assert error <= max(1e-4, 1.25 * relative_error(stock[:, :same], reference[:, :same]))


@pytest.mark.gpu
def test_buffers_stay_where_they_are_and_the_second_call_captures_nothing():
    model = hf_mla.patch(gpu_model())
    batch = on_gpu(prompts([9, 17]))
    first = generate(model, batch, 20)
    (graph,) = graphs_of(model)
    buffers = [graph.input_ids, graph.device_step.block_table, graph.device_step.kv_lens, graph.page_bases]
    addresses = [buffer.data_ptr() for buffer in buffers]
    second = generate(model, batch, 20)
    (again,) = graphs_of(model)
    assert again is graph
    assert addresses == [buffer.data_ptr() for buffer in buffers]
    assert_same(second, first, 1e-6)


@pytest.mark.gpu
def test_captured_with_eight_rows_run_with_five():
    model = hf_mla.patch(gpu_model())
    generate(model, on_gpu(prompts([5, 6, 7, 8, 9, 10, 11, 12])), 8)
    batch = on_gpu(prompts([20, 3, 30, 11, 18], seed=3))
    got = generate(model, batch, 30)
    assert len(graphs_of(model)) == 1
    assert_same(got, twin_of_stock(model).generate(**batch, max_new_tokens=30, **GREEDY), 1e-4)


@pytest.mark.gpu
def test_captured_short_replayed_long():
    model = hf_mla.patch(gpu_model(max_position_embeddings=2048), block_size=16)
    generate(model, on_gpu(prompts([4])), 4)
    batch = on_gpu(prompts([150], seed=4))
    got = generate(model, batch, 60)  # up to 14 of the 16 table columns that the first call captured
    assert len(graphs_of(model)) == 1
    assert_same(got, twin_of_stock(model).generate(**batch, max_new_tokens=60, **GREEDY), 1e-4)


@pytest.mark.gpu
def test_weights_edited_in_place_and_exchanged_between_replays():
    model = hf_mla.patch(gpu_model())
    batch = on_gpu(prompts([9, 17]))
    generate(model, batch, 10)
    with torch.no_grad():
        model.model.layers[1].self_attn.kv_b_proj.weight.mul_(1.5)
    assert_same(generate(model, batch, 20), twin_of_stock(model).generate(**batch, max_new_tokens=20, **GREEDY), 1e-4)
    new = torch.nn.Parameter(torch.randn_like(model.model.layers[0].self_attn.o_proj.weight) * 0.1)
    model.model.layers[0].self_attn.o_proj.weight = new
    assert_same(generate(model, batch, 20), twin_of_stock(model).generate(**batch, max_new_tokens=20, **GREEDY), 1e-4)


@pytest.mark.gpu
def test_two_caches_in_turn_and_a_second_model():
    model, other = hf_mla.patch(gpu_model()), hf_mla.patch(gpu_model(seed=7))
    a, b = on_gpu(prompts([12])), on_gpu(prompts([21], seed=5))
    caches = {name: hf_mla.PagedMLACache() for name in "ab"}
    tokens = {"a": a["input_ids"], "b": b["input_ids"]}
    alone = {"a": generate(model, a, 12).sequences, "b": generate(model, b, 12).sequences}
    with torch.no_grad():
        for _ in range(12):
            for name in "ab":
                past = caches[name].get_seq_length()
                ids = tokens[name][:, past:]
                positions = torch.arange(past, tokens[name].shape[1], device=cuda)[None]
                mask = torch.ones_like(tokens[name])
                logits = model(ids, past_key_values=caches[name], position_ids=positions, attention_mask=mask).logits
                tokens[name] = torch.cat([tokens[name], logits[:, -1:].argmax(-1)], 1)
            generate(other, a, 3)
    assert torch.equal(tokens["a"], alone["a"]) and torch.equal(tokens["b"], alone["b"])


@pytest.mark.gpu
def test_beams_and_sampling_under_graphs_are_stock():
    model = hf_mla.patch(gpu_model(), block_size=16)
    stock = twin_of_stock(model)
    batch = on_gpu(prompts([9, 30]))
    kwargs = {"max_new_tokens": 24, "num_beams": 3}
    assert torch.equal(
        model.generate(**batch, cache_implementation="paged_mla", **kwargs), stock.generate(**batch, **kwargs)
    )
    torch.manual_seed(0)
    got = model.generate(**batch, cache_implementation="paged_mla", do_sample=True, max_new_tokens=24)
    torch.manual_seed(0)
    assert torch.equal(got, stock.generate(**batch, do_sample=True, max_new_tokens=24))


@pytest.mark.gpu
def test_hidden_states_and_attentions_run_eagerly():
    model = hf_mla.patch(gpu_model())
    batch = on_gpu(prompts([9, 17]))
    expected = twin_of_stock(model).generate(**batch, max_new_tokens=6, output_hidden_states=True, **GREEDY)
    got = generate(model, batch, 6, output_hidden_states=True)
    assert not graphs_of(model)
    assert relative_error(got.hidden_states[-1][-1], expected.hidden_states[-1][-1]) < 1e-4


@pytest.mark.gpu
def test_copies_and_unpatched_models_leave_graphs_behind():
    model = hf_mla.patch(gpu_model())
    batch = on_gpu(prompts([9, 17]))
    expected = generate(model, batch, 12)
    copied = copy.deepcopy(model)
    assert not graphs_of(copied)
    assert_same(generate(copied, batch, 12), expected, 1e-6)
    hf_mla.unpatch(model)
    assert "forward" not in model.model.__dict__
    assert_same(model.generate(**batch, max_new_tokens=12, **GREEDY), expected, 1e-4)


@pytest.mark.gpu
def test_memory_does_not_grow_over_100_calls():
    model = hf_mla.patch(gpu_model())
    batch = on_gpu(prompts([9, 17]))

    def used():
        gc.collect()
        return torch.cuda.memory_allocated()

    generate(model, batch, 8)
    before = used()
    for _ in range(100):
        generate(model, batch, 8)
    assert used() <= before


@pytest.mark.gpu
def test_a_cpu_offloaded_model_says_why_it_runs_eagerly(caplog):
    accelerate = pytest.importorskip("accelerate")
    model = build("deepseek_v2")
    stock = twin(model).to(cuda)
    accelerate.cpu_offload(model, execution_device=cuda)
    hf_mla.patch(model)
    batch = on_gpu(prompts([9, 17]))
    assert_same(generate(model, batch, 6), stock.generate(**batch, max_new_tokens=6, **GREEDY), 1e-4)
