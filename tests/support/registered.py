"""Every registered drafter, made from a configuration for one tiny target, for the losslessness suite.

A method without an entry here fails the suite, so that none can be added without passing it. The vocabulary
is so small that even heads of random weights are right often.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tiny import tiny_llama, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Mamba2Config, MambaConfig, PreTrainedModel, PreTrainedTokenizerFast

from gammaray.config import Config, parse
from gammaray.engine.drafters import int8_rows
from support import block_heads, heads

VOCAB = 12
LAYERS = 4
LENGTH = 96
EOS = VOCAB - 1


def target() -> PreTrainedModel:
    return tiny_llama(VOCAB, layers=LAYERS, max_position_embeddings=LENGTH)


def save(folder: Path, model: PreTrainedModel) -> str:
    """A checkpoint with the tokenizer that all share; returns its name as a model."""
    vocab = {f"w{i}": i for i in range(VOCAB)}
    core = Tokenizer(WordLevel(vocab, unk_token="w0"))
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token=f"w{EOS}").save_pretrained(folder)
    return str(folder)


Drafters = dict[str, dict[str, Any]]  # by name: an entry of the configuration


def ngram(folder: Path) -> Drafters:
    return {"ngram": {"method": "ngram", "max_ngram": 3, "min_ngram": 1}}


def model(folder: Path) -> Drafters:
    small = save(folder / "small", tiny_llama(VOCAB, layers=1, seed=5, max_position_embeddings=LENGTH))
    named = {"method": "model", "model": small, "dtype": "float32"}
    others = {f"model-{tree}": {**named, "tree": tree} for tree in ("dynamic", "sequoia")}
    return {
        "model": named,
        "model-sampled": {**named, "draft_sampling": True},
        **others,
        **recurrent(folder, named),
    }


def recurrent(folder: Path, named: dict[str, Any]) -> Drafters:
    """Of the same method: with states in place of KV. Mamba 2 may go on from a state with many tokens."""
    shapes = {
        "mamba": (MambaConfig, {}),
        "mamba2": (Mamba2Config, {"num_heads": 8, "head_dim": 8, "n_groups": 1}),
    }
    saved = {
        name: save(folder / name, tiny_model(config, VOCAB, layers=1, seed=3, state_size=4, **shape))
        for name, (config, shape) in shapes.items()
    }
    forms = {
        "model-mamba": {"model": saved["mamba"]},
        "model-mamba-dynamic": {"model": saved["mamba"], "tree": "dynamic"},
        "model-mamba2-sampled": {"model": saved["mamba2"], "draft_sampling": True},
    }
    return {name: {**named, **form} for name, form in forms.items()}


def layer_exit(folder: Path) -> Drafters:
    """One with a norm and a head of its own, behind the target's first layers."""
    own, whole = tiny_llama(VOCAB, layers=2, seed=7, max_position_embeddings=LENGTH), target()
    own.model.embed_tokens = whole.model.embed_tokens
    own.model.layers = whole.model.layers[:2]
    forms = {
        "": {},
        "-dynamic": {"tree": "dynamic"},
        "-sequoia": {"tree": "sequoia"},
        "-sampled": {"draft_sampling": True},
        "-own-head": {"path": save(folder / "own", own)},
    }
    return {
        f"layer_exit{name}": {"method": "layer_exit", "layers": 2, **form} for name, form in forms.items()
    }


def eagle(folder: Path) -> Drafters:
    path = heads.write(folder, heads.eagle(target()), heads.settings(target()))
    named = {"method": "eagle", "path": path}
    return {"eagle": named, "eagle-sampled": {**named, "tree": "static", "draft_sampling": True}}


def eagle3(folder: Path) -> Drafters:
    """A draft vocabulary of two thirds of the target's. `shared`: as it is trained here, with rows of the
    target's own head, in bfloat16 beside a target in float32; then in 8 bits."""
    tokens, config = [token for token in range(VOCAB) if token % 3], heads.settings(target())
    named = {"method": "eagle3", "path": heads.write(folder, heads.eagle3(target(), tokens), config)}
    forms = {f"eagle3-{tree}": {**named, "tree": tree} for tree in ("static", "sequoia")}
    lean = heads.lean_eagle3(target(), tokens)
    shared = {**named, "path": heads.write(folder / "shared", lean, config), "dtype": "bfloat16"}
    small = {**named, "path": heads.write(folder / "small", int8_rows.packed(lean), config)}
    forms |= {"eagle3-shared": shared, "eagle3-shared-int8": small}
    return {"eagle3": named, "eagle3-sampled": {**forms["eagle3-static"], "draft_sampling": True}, **forms}


def mtp(folder: Path) -> Drafters:
    layer = dict(tiny_llama(VOCAB, layers=1, seed=9).model.layers[0].state_dict())
    own = {"deepseek": {}, "mimo": {"draft_sampling": True}}
    return {
        "mtp" if layout == "deepseek" else f"mtp-{layout}": {
            "method": "mtp",
            "path": heads.write(folder / layout, heads.mtp(target(), layout, layer)),
            **form,
        }
        for layout, form in own.items()
    }


def suffix(folder: Path) -> Drafters:
    return remembering("suffix", min_match=1)


def recycle(folder: Path) -> Drafters:
    return remembering("recycle", candidates=4)


def remembering(method: str, **form: int) -> Drafters:
    """With memory of one request and of a tenant."""
    own = {"method": method, **form}
    return {method: own, f"{method}-tenant": {**own, "memory": "tenant"}}


def lookahead(folder: Path) -> Drafters:
    long = {"method": "lookahead", "window": 2, "ngram": 4, "pool": 2}
    return {"lookahead": {"method": "lookahead"}, "lookahead-long": long}


def composite(folder: Path) -> Drafters:
    """Of others that are registered here."""
    parts = {
        "composite": ["ngram", "model"],
        "composite-telling": ["suffix", "model", "recycle"],
        "composite-heads": ["lookahead-long", "eagle3", "layer_exit", "eagle"],
    }
    return {name: {"method": "composite", "drafters": own} for name, own in parts.items()}


def medusa(folder: Path) -> Drafters:
    path = heads.write(folder, block_heads.medusa(target()), block_heads.medusa_settings())
    return {"medusa": {"method": "medusa", "path": path}}


def dspark(folder: Path) -> Drafters:
    """Every Markov head, both layouts, a draft vocabulary of two thirds of the target's, and DFlash."""
    reduced = {"layout": "speculators", "draft_vocab_size": VOCAB * 2 // 3, "markov_head_type": "gated"}
    forms: dict[str, dict[str, Any]] = {
        "dspark": {},
        "dspark-sampled": reduced,
        "dspark-rnn": {"markov_head_type": "rnn", "confidence_head_with_markov": False},
        "dspark-dflash": {"layout": "speculators", "speculators_model_type": "dflash"},
    }
    return {
        name: {
            "method": "dspark",
            "path": block_heads.write_dspark(folder / name, target(), **form),
            "draft_sampling": name == "dspark-sampled",
        }
        for name, form in forms.items()
    }


# By method: drafters in every form that matters, one named after the method. `folder` is theirs to fill.
FORMS: Mapping[str, Callable[[Path], Drafters]] = {
    "ngram": ngram,
    "model": model,
    "suffix": suffix,
    "recycle": recycle,
    "lookahead": lookahead,
    "composite": composite,
    "layer_exit": layer_exit,
    "eagle": eagle,
    "eagle3": eagle3,
    "mtp": mtp,
    "medusa": medusa,
    "dspark": dspark,
}


def configuration(folder: Path) -> Config:
    """The target, and all forms of all methods."""
    drafters: Drafters = {}
    for method, forms in FORMS.items():
        (folder / method).mkdir()
        drafters |= forms(folder / method)
    return parse(
        {
            "target": {
                "model": save(folder / "target", target()),
                "dtype": "float32",
                "kv": {"num_blocks": 96, "block_size": 4},
            },
            "drafters": drafters,
        },
        "test",
    )
