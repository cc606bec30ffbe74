"""What `tops.fuse` does to the model classes of transformers, each from a small configuration.

    python benchmarks/families.py [--kind causal] [--only llama,gemma2] [--out FILE.json]
    python benchmarks/families.py --record    # for the table in docs/models.md

Every family of a kind is built with random weights, fused, and compared with the plain model: the
loss and all gradients, and the bytes that forward saves for backward. A row says what the rules
made of it, and what the report says was left.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import logging
import signal
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from suite import pages
from suite.results import Results
from suite.rows import RECORDED
from torch import Tensor, nn
from tqdm import tqdm
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import transformer_ops as tops

KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}
# Small values -> the attributes of configurations that get them, if a class has them.
_NAMES: dict[int, str] = {
    64: "hidden_size d_model n_embd emb_dim encoder_hidden_size dim_model embedding_size "
    "input_embedding_size output_embedding_size hidden_size_per_layer_input attention_hidden_size "
    "max_position_embeddings n_positions n_ctx max_seq_len",
    128: "intermediate_size ffn_dim d_inner n_inner ffn_hidden_size d_ff encoder_ffn_dim dim_ff "
    "decoder_ffn_dim ffn_size feed_forward_size",
    2: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_blocks "
    "num_decoder_layers num_encoder_layers num_key_value_heads num_kv_heads eos_token_id "
    "swa_num_key_value_heads num_experts_per_tok moe_topk moe_k num_experts_per_token",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads num_experts "
    "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads num_labels "
    "num_local_experts n_routed_experts moe_num_experts num_routed_experts",
    16: "head_dim d_kv d_head dim_head attention_head_dim q_lora_rank kv_lora_rank o_lora_rank",
    256: "vocab_size vocab_size_per_layer_input char_vocab_size",
    1: "n_group topk_group n_shared_experts num_shared_experts first_k_dense_replace bos_token_id "
    "moe_layer_start_index num_dense_layers decoder_start_token_id",
    24: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "expert_ffn_size",
    8: "qk_rope_head_dim qk_nope_head_dim v_head_dim patch_size rotary_dim",
    32: "image_size",
    0: "pad_token_id",
}
SMALL = {name: value for value, names in _NAMES.items() for name in names.split()}
SLOWEST = 120  # seconds
LARGEST = 8_000_000  # parameters


class FamilyRow(NamedTuple):
    """A family: the numbers of parts by rule, the ratio of saved bytes, the largest error of a
    gradient, seconds to fuse, why parts were left, and in how many parts attention ran as an op; or
    why there is no model."""

    name: str
    rules: Mapping[str, int] = MappingProxyType({})
    saved: float = 0.0
    error: float = 0.0
    seconds: float = 0.0
    left: Sequence[str] = ()
    attention: int = 0
    failed: str = ""

    def __str__(self) -> str:
        if self.failed:
            return f"{self.name:24} {self.failed}"
        rules = ", ".join(f"{count} {rule}" for rule, count in self.rules.items())
        left = f" | {'; '.join(self.left)}" if self.left else ""
        numbers = f"{self.attention} {self.saved:.2f} {self.error:.0e} {self.seconds:.1f} s"
        return f"{self.name:24} {numbers} {rules}{left}"


def config_of(kind: Any) -> Any:
    """A small configuration of a class, without dropout."""
    fields = {**dict.fromkeys(inspect.signature(kind).parameters), **kind().to_dict()}
    own = {name: value for name, value in SMALL.items() if name in fields}
    if "kv_lora_rank" in fields:
        # Latent attention has no fewer heads of keys.
        own["num_key_value_heads"] = own.get("num_attention_heads", 4)
    nothing = {k: 0.0 for k, v in fields.items() if "drop" in k and isinstance(v, float)}
    return kind(**own, **nothing)


def model_of(name: str, classes: str | tuple[str, ...]) -> Any:
    kind = getattr(transformers, classes if isinstance(classes, str) else classes[0])
    config = config_of(CONFIG_MAPPING[name])
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = kind(config).train()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.1)  # so that experts are chosen clearly
    return model


def inputs_of(kind: str, model: Any, seed: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    tokens = torch.randint(3, 200, (4, 32))  # more rows than features, as in training
    if kind in ("causal", "masked", "seq2seq"):
        return {"input_ids": tokens, "labels": tokens}
    labels = torch.tensor([1, 0])
    if kind == "image":
        config = model.config
        size = getattr(config, "image_size", 32)
        sides = [size] * 2 if isinstance(size, int) else list(size)
        return {
            "pixel_values": torch.randn(2, getattr(config, "num_channels", 3), *sides),
            "labels": labels,
        }
    if kind == "speech":
        bins = getattr(model.config, "num_mel_bins", 80)
        frames = 2 * getattr(model.config, "max_source_positions", 32)
        return {"input_features": torch.randn(2, bins, frames), "labels": tokens}
    return {model.main_input_name: torch.randn(2, 4000), "labels": labels}


def step(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(2)
    np.random.seed(2)  # models of audio mask their input by it
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def error_of(plain: Any, model: Any, inputs: dict[str, Tensor]) -> float:
    """The largest difference of the loss or of a gradient, by its norm. Some gradients are zero but
    for rounding."""
    (loss, grads), (found, own) = (step(one, inputs) for one in (plain, model))
    if grads.keys() != own.keys():
        return float("inf")
    least = max((float(grad.norm()) for grad in grads.values()), default=0.0)
    errors = [
        float((own[n] - grad).norm() / (grad.norm() + least / 10)) for n, grad in grads.items()
    ]
    return max([*errors, float((found - loss).abs() / loss.abs())])


def row_of(kind: str, name: str, classes: Any) -> FamilyRow:
    try:
        plain = model_of(name, classes)
        inputs = inputs_of(kind, plain)
        model = copy.deepcopy(plain)
        step(plain, inputs)
    except Exception as why:
        return FamilyRow(name, failed=f"{type(why).__name__}: {' '.join(str(why).split())}"[:90])
    start = time.perf_counter()
    report = tops.fuse(model)
    seconds = time.perf_counter() - start
    error = error_of(plain, model, inputs)
    if error > 1e-4:
        # Rounding moves an input of a ReLU across 0, hardly one of another batch, too.
        error = min(error, error_of(plain, model, inputs_of(kind, plain, seed=3)))
    before, after = report.saved_bytes(**inputs)
    rules = Counter(row.rule for row in report.fused)
    left = Counter(f"{row.kind}: {row.reason}" for row in report.skipped)
    attention = sum(
        bool(region.state.variants)
        for module in model.modules()
        if hasattr(module, "fused")
        for region in module.fused.regions
    )
    return FamilyRow(name, dict(rules), after / before, error, seconds, sorted(left), attention)


def _stop(*_: Any) -> None:
    raise TimeoutError(f"more than {SLOWEST} s")


def survey(kind: str, only: Iterable[str]) -> list[FamilyRow]:
    families = dict(getattr(modeling_auto, KINDS[kind]))
    if unknown := [name for name in only if name not in families]:
        raise SystemExit(f"--only must name families of {kind}, got {unknown[0]}")
    wanted = [name for name in families if not only or name in only]
    signal.signal(signal.SIGALRM, _stop)
    rows = []
    for name in tqdm(wanted, desc=kind, file=sys.stderr):
        signal.alarm(SLOWEST)
        try:
            rows.append(row_of(kind, name, families[name]))
        except TimeoutError as why:
            rows.append(FamilyRow(name, failed=str(why)))
        signal.alarm(0)
        tqdm.write(str(rows[-1]), file=sys.stdout)
        sys.stdout.flush()
    return rows


def record(rows: Sequence[FamilyRow]) -> None:
    """Writes the families into the record, and into the page."""
    keys = ("name", "attention", "saved", "error", "rules")
    found = [{key: row._asdict()[key] for key in keys} for row in rows]
    for row in found:
        # Which products are ours depends on the processor.
        row["rules"] = {name: n for name, n in row["rules"].items() if name != "product"}
        row["saved"], row["error"] = round(row["saved"], 3), float(f"{row['error']:.1e}")
    lines = ",\n".join(json.dumps(row) for row in found)
    version = json.dumps(transformers.__version__)
    text = f'{{"transformers": {version}, "rows": [\n{lines}\n]}}\n'
    pages.FAMILIES.write_text(text, encoding="utf-8")
    pages.write(Results.read(RECORDED))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, default="causal")
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--out", type=Path, help="a JSON file of all rows")
    parser.add_argument(
        "--record", action="store_true", help="writes all causal families into docs/models.md"
    )
    options = parser.parse_args(arguments)
    if options.record and (options.only or options.kind != "causal"):
        raise SystemExit("--record must be of all causal families, got --only or another --kind")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable()
    torch.set_num_threads(1)
    rows = survey(options.kind, [name for name in options.only.split(",") if name])
    if options.out is not None:
        options.out.write_text(
            json.dumps([{**row._asdict(), "rules": dict(row.rules)} for row in rows], indent=1)
        )
    built = [row for row in rows if not row.failed]
    if not built:
        return
    if options.record:
        record(built)
    count = sum(row.attention > 0 for row in built)
    saved = statistics.median(row.saved for row in built)
    error = max(row.error for row in built)
    print(f"{count} of {len(built)} have attention in a plan; {len(rows)} names")
    print(f"saved {saved:.2f} in the median; largest error of a gradient {error:.0e}")


if __name__ == "__main__":
    main()
