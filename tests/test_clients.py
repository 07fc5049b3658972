"""What people run models with, on a patched model and on stock: PEFT, Trainer, pipelines, streamers, device maps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import BLOCK, PAGED, assert_same, cache_of
from tiny import GREEDY, build, prompts, relative_error, scores_of, twin
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    pipeline,
)

import hf_mla
from hf_mla import PagedMLACache

BATCH = prompts([9, 14])
TWO_LAYERS = {"num_hidden_layers": 2}


def with_labels(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def generate(model: Any, **arguments: Any) -> Any:
    return model.generate(**prompts([3, 20]), max_new_tokens=8, **GREEDY, **arguments)


def assert_decodes_like(stock: Any, patched: Any) -> None:
    """Of two models with the same weights: stock's tokens and logits, from pages."""
    got = generate(patched, **PAGED)
    assert type(cache_of(got)) is PagedMLACache
    assert_same(got, generate(stock), 1e-4)


@pytest.fixture(scope="module")
def stock() -> PreTrainedModel:
    return build(**TWO_LAYERS)


@pytest.fixture
def model(stock: PreTrainedModel) -> PreTrainedModel:
    return hf_mla.patch(twin(stock), block_size=BLOCK)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", padding_side="left")


# Training


def lora_steps(model: Any, steps: int = 3) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Losses and gradients of a few optimizer steps in training mode."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses, gradients = [], []
    model.train()
    for step in range(steps):
        torch.manual_seed(step)  # of the dropout
        loss = model(**with_labels(prompts([9, 14], seed=step))).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: weight.grad.clone() for name, weight in trained.items()})
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return losses, gradients


@pytest.mark.parametrize("patch_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_lora_training_gives_stocks_losses_gradients_and_then_tokens(
    stock: PreTrainedModel, tmp_path: Path, patch_first: bool
) -> None:
    peft = pytest.importorskip("peft")
    targets = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=16, lora_dropout=0.2, target_modules=targets)

    def adapted(model: Any) -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(model, config)

    expected = adapted(twin(stock))
    model = twin(stock)
    if patch_first:
        hf_mla.patch(model, block_size=BLOCK)
    model = hf_mla.patch(adapted(model), block_size=BLOCK)
    losses, gradients = lora_steps(model)
    stock_losses, stock_gradients = lora_steps(expected)
    assert torch.equal(torch.stack(losses), torch.stack(stock_losses)) and losses[0] > losses[-1] > 0
    for got, wanted in zip(gradients, stock_gradients, strict=True):
        assert len(got) == 2 * len(targets) * 2 and got.keys() == wanted.keys()
        assert all(torch.equal(got[name], wanted[name]) for name in got)
    assert relative_error(scores_of(generate(expected)), scores_of(generate(stock))) > 1e-3
    assert_decodes_like(expected, model)
    for each, folder in ((expected, "stock"), (model, "patched")):
        each.save_pretrained(tmp_path / folder)
    name = "adapter_model.safetensors"
    assert (tmp_path / "stock" / name).read_bytes() == (tmp_path / "patched" / name).read_bytes()
    assert "hf_mla" not in (tmp_path / "patched" / "adapter_config.json").read_text()
    again = peft.PeftModel.from_pretrained(hf_mla.patch(twin(stock), block_size=BLOCK), tmp_path / "patched")
    assert_decodes_like(expected, again.eval())


class Sampler(TrainerCallback):
    """Generates at the end of each step, as people do to watch a training."""

    def __init__(self, **arguments: Any):
        self.arguments = arguments
        self.scores: list[torch.Tensor] = []

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        model.eval()
        self.scores.append(scores_of(generate(model, **self.arguments)))
        model.train()


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_trainer_steps_and_what_is_generated_between_them(
    stock: PreTrainedModel, tmp_path: Path, checkpointing: bool
) -> None:
    rows = [{key: value[i] for key, value in with_labels(BATCH).items()} for i in (0, 1, 0, 1)]
    ends = []
    for which, arguments in ((twin(stock), {}), (hf_mla.patch(twin(stock), block_size=BLOCK), PAGED)):
        folder = tmp_path / ("paged" if arguments else "stock")
        options = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            max_steps=2,
            learning_rate=1e-2,
            gradient_checkpointing=checkpointing,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=1,
        )
        sampler = Sampler(**arguments)
        trainer = Trainer(model=which, args=options, train_dataset=rows, eval_dataset=rows, callbacks=[sampler])
        loss = trainer.train().training_loss
        trainer.save_model(str(folder))
        ends.append((loss, trainer.evaluate()["eval_loss"], which, sampler.scores))
    (stock_loss, stock_eval, expected, stock_scores), (loss, evaluated, model, scores) = ends
    assert loss == stock_loss and evaluated == stock_eval
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True))
    assert not torch.equal(model.lm_head.weight, stock.lm_head.weight)
    assert len(scores) == 2 and relative_error(stock_scores[1], stock_scores[0]) > 1e-3
    assert relative_error(torch.stack(scores), torch.stack(stock_scores)) < 1e-4
    name = "model.safetensors"
    assert (tmp_path / "paged" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes()


# Pipelines and streamers

TEXTS = ["w5 w6 w7 w8 w9", "w10 w11", "w12 w13 w14 w15 w16 w17 w18 w19 w20"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"batch_size": 3},
        {"batch_size": 2, "num_return_sequences": 2, "num_beams": 2},
        pytest.param({"batch_size": 3, "return_full_text": False, "max_new_tokens": 20}, marks=pytest.mark.slow),
        pytest.param({"return_tensors": True}, marks=pytest.mark.slow),
    ],
    ids=["one by one", "batch", "beams", "new text", "tensors"],
)
def test_a_pipeline_says_what_stocks_says(
    stock: PreTrainedModel, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, options: dict[str, Any]
) -> None:
    options = {"max_new_tokens": 6, "do_sample": False, **options}
    expected = pipeline("text-generation", model=stock, tokenizer=tokenizer)(TEXTS, **options)
    assert pipeline("text-generation", model=model, tokenizer=tokenizer)(TEXTS, **options, **PAGED) == expected
    config = GenerationConfig(**PAGED, pad_token_id=0)
    said = pipeline("text-generation", model=model, tokenizer=tokenizer)(TEXTS, generation_config=config, **options)
    assert said == expected


def test_a_pipeline_made_from_a_folder_while_enabled(
    stock: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = {"max_new_tokens": 6, "do_sample": False, "batch_size": 3}
    expected = pipeline("text-generation", model=str(tmp_path))(TEXTS, **options)
    hf_mla.enable(block_size=BLOCK)
    try:
        generator = pipeline("text-generation", model=str(tmp_path))
    finally:
        hf_mla.disable()
    made: list[PagedMLACache] = []
    reserve = PagedMLACache.reserve_tokens
    monkeypatch.setattr(PagedMLACache, "reserve_tokens", lambda self, rows: made.append(self) or reserve(self, rows))
    assert generator(TEXTS, **options, **PAGED) == expected
    assert len(made) == 1 and made[0].options.block_size == BLOCK and made[0].batch_size == 3


class Pieces(TextStreamer):
    """Keeps what it would print, piece by piece."""

    def __init__(self, tokenizer: Any, **options: Any):
        super().__init__(tokenizer, **options)
        self.pieces: list[str] = []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.pieces.append(text)


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_a_text_streamer_gets_stocks_pieces(
    stock: PreTrainedModel, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, skip_prompt: bool
) -> None:
    streamed = []
    for which, arguments in ((stock, {}), (model, PAGED)):
        streamer = Pieces(tokenizer, skip_prompt=skip_prompt)
        which.generate(**prompts([9]), max_new_tokens=20, do_sample=False, streamer=streamer, **arguments)
        streamed.append(streamer.pieces)
    assert streamed[0] == streamed[1] and len(streamed[0]) > 15


def stream(model: Any, tokenizer: Any, prompt: dict[str, torch.Tensor], **arguments: Any) -> Iterator[str]:
    """Text of a generation that runs in a thread of its own."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    options = {**prompt, "max_new_tokens": 20, "do_sample": False, "streamer": streamer, **arguments}
    thread = threading.Thread(target=model.generate, kwargs=options)
    thread.start()
    yield from streamer
    thread.join()


def test_iterators_over_two_generations_in_threads_at_once(
    stock: PreTrainedModel, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    both = [prompts([9], seed=3), prompts([17], seed=4)]
    expected = [list(stream(stock, tokenizer, prompt)) for prompt in both]
    running = [stream(model, tokenizer, prompt, **PAGED) for prompt in both]
    got: list[list[str]] = [[], []]
    for pieces in zip(*running, strict=True):  # in turns, so that both run at once
        for heard, piece in zip(got, pieces, strict=True):
            heard.append(piece)
    assert got == expected and got[0] != got[1]


# Where weights lie

MAPS = {
    "one device": "cpu",
    "whole on disk": {"": "disk"},
    "a layer and the head on disk": {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "lm_head": "disk",
    },
}


@pytest.mark.parametrize("way", ["patch", "enable"])
@pytest.mark.parametrize("where", MAPS)
def test_a_model_loaded_by_a_device_map(stock: PreTrainedModel, tmp_path: Path, where: str, way: str) -> None:
    stock.save_pretrained(tmp_path / "model")

    def load() -> Any:
        options = {"device_map": MAPS[where], "offload_folder": str(tmp_path / "off"), "dtype": torch.float32}
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options)
        loaded.generation_config.eos_token_id = None  # as `build` has it; what is loaded takes the config's
        assert any(weight.is_meta for weight in loaded.parameters()) == (where != "one device")
        return loaded

    expected = load()
    if way == "enable":
        hf_mla.enable(block_size=BLOCK)
    try:
        loaded = load()
    finally:
        hf_mla.disable()
    if way == "patch":
        hf_mla.patch(loaded, block_size=BLOCK)
    assert_decodes_like(stock, loaded)
    hf_mla.unpatch(loaded)
    assert torch.equal(scores_of(generate(loaded)), scores_of(generate(expected)))
