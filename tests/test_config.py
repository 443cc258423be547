"""The configuration: layers, conversion, provenance, and refusals that name everything wrong."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from jaxgpt import config
from jaxgpt.errors import ConfigError
from jaxgpt.validation import num_steps


def refused(*overrides: str, path: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config.load(path, list(overrides))
    assert caught.value.exit_code == 64
    return caught.value.problems


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_later_layers_win_and_each_value_knows_its_origin(tmp_path):
    write(tmp_path / "base.toml", "[train]\nnum_steps = 3\nglobal_batch = 4\n[optim]\nlr = 0.5\n")
    preset = write(
        tmp_path / "run.toml", 'base = "base.toml"\n[train]\n\nnum_steps = 7\nmicro_batch = 2\n'
    )
    cfg = config.load(preset, ["train.micro_batch=4"])
    assert (cfg.train.num_steps, cfg.train.global_batch, cfg.train.micro_batch) == (7, 4, 4)
    assert cfg.optim.lr == 0.5 and cfg.optim.beta1 == 0.9
    assert cfg.origins["train.num_steps"] == f"{preset}:4"
    assert cfg.origins["train.global_batch"] == f"{tmp_path / 'base.toml'}:3"
    assert cfg.origins["train.micro_batch"] == "override 'train.micro_batch=4'"
    assert "optim.beta1" not in cfg.origins


def test_a_base_has_no_base(tmp_path):
    write(tmp_path / "a.toml", "[run]\nseed = 1\n")
    write(tmp_path / "b.toml", 'base = "a.toml"\n')
    assert "one level" in refused(path=write(tmp_path / "c.toml", 'base = "b.toml"\n'))[0]


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("optim.lr=1e-4", "optim", "lr", 1e-4),
        ("optim.lr=1", "optim", "lr", 1.0),
        ("train.num_tokens=1e9", "train", "num_tokens", 1_000_000_000),
        ("train.num_tokens=1_000", "train", "num_tokens", 1000),
        ("run.dir=runs/a b", "run", "dir", "runs/a b"),
        ('run.dir="quoted"', "run", "dir", "quoted"),
        ("run.dir=3", "run", "dir", "3"),
        ("data.document_mask=true", "data", "document_mask", True),
        ("data.sources=stdlib", "data", "sources", ("stdlib",)),
        ('data.sources=["a", "b"]', "data", "sources", ("a", "b")),
        (
            'tokenizer.user_symbols=["<|a|>", "<x,y>"]',
            "tokenizer",
            "user_symbols",
            ("<|a|>", "<x,y>"),
        ),
        ("data.store={a = 0.5, b = 2}", "data", "store", {"a": 0.5, "b": 2.0}),
        ("--train.num_steps=9", "train", "num_steps", 9),
    ],
)
def test_overrides_are_toml_values(override, section, key, value):
    got = getattr(getattr(config.load(None, [override]), section), key)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("word", ["False", "0", "no", "1", '"true"'])
def test_only_true_and_false_are_booleans(word):
    assert "true or false" in refused(f"data.document_mask={word}")[0]


@pytest.mark.parametrize(
    "override", ["train.num_steps=1.5", "train.num_steps=x", "optim.lr=nan", "optim.lr=inf",
                 "optim.lr=true", "model.aux_layers=[1.5]", "data.sources={a=1}",
                 "train.num_steps="]
)  # fmt: skip
def test_values_of_the_wrong_type_are_refused_by_name(override):
    assert override.split("=")[0] in refused(override)[0]


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("learning_rte=1", "optim.lr"),
        ("optim.learning-rate=1", "optim.lr"),
        ("optim.num_steps=3", "train.num_steps"),
        ("model.num_layer=3", "model.num_layers"),
        ("modle.num_layers=3", "model.num_layers"),
        ("model.mlp=gelu_tan", "gelu_tanh"),
        ("optim.name=adam", "adamw"),
    ],
)
def test_unknown_keys_and_choices_name_the_nearest_valid_one(override, nearest):
    assert f"did you mean {nearest}?" in refused(override)[0]


@pytest.mark.parametrize(
    ("override", "choice"), [("optim.name=adamwx", "adamw"), ("model.mlp=mish", "swiglu")]
)
def test_what_is_not_offered_is_refused_by_name_with_the_choices(override, choice):
    problem = refused(override)[0]
    assert all(word in problem for word in (*override.split("="), choice))


def test_a_key_at_top_level_of_a_file_is_refused_with_its_line(tmp_path):
    path = write(tmp_path / "x.toml", "# comment\nlearning_rte = 1\n")
    assert refused(path=path)[0].startswith(f"{path}:2: unknown key learning_rte")


def test_all_problems_are_reported_at_once(tmp_path):
    path = write(tmp_path / "x.toml", "[optim]\nlrr = 1\n[model]\nnum_heads = 5\nembed_dim = 8\n")
    problems = refused("data.document_mask=0", "train.micro_batch=3", path=path)
    assert len(problems) == 4
    assert f"{path}:2" in problems[0] and "document_mask" in problems[1]


@pytest.mark.parametrize(
    "text", ["[optim", "lr = ", "[optim]\nlr = 1\nlr = 2\n", "a = " + "[" * 100_000, "\x00"]
)
def test_a_broken_file_is_one_line_with_its_name(tmp_path, text):
    problems = refused(path=write(tmp_path / "x.toml", text))
    assert (
        len(problems) == 1 and "\n" not in problems[0] and str(tmp_path / "x.toml") in problems[0]
    )


def test_a_missing_file_or_a_folder_is_refused(tmp_path):
    assert "No such file" in refused(path=tmp_path / "none.toml")[0]
    assert str(tmp_path) in refused(path=tmp_path)[0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.global_batch=10", "train.micro_batch=4"], ["10", "4"]),
        (["optim.warmup_steps=12", "train.num_steps=10"], ["warmup_steps = 12", "num_steps = 10"]),
        (["model.num_heads=4", "model.embed_dim=32", "model.num_kv_heads=3"], ["4", "3"]),
        (["model.positions=rope", "model.head_dim=5"], ["5", "even"]),
        (["mesh.fsdp=-1"], ["mesh.data = mesh.fsdp = -1", "set mesh.data = 1"]),
        (["mesh.context=0"], ["mesh.context = 0", "-1 for the rest"]),
        (["mesh.rounds=2"], ["mesh.rounds = 2", "mesh.stage > 1"]),
        (["mesh.slow={datas=2}"], ["'datas'", "data, fsdp"]),
        (["mesh.fsdp=4", "mesh.slow={fsdp=3}"], ["mesh.slow.fsdp = 3", "mesh.fsdp = 4"]),
        (['model.remat_save=["q"]'], ["model.remat_save = ['q']", 'model.remat = "full"']),
        (["model.remat=full", 'model.remat_save=["qkv"]'], ["'qkv'", "attn_out"]),
        (
            ["model.remat=full", 'model.remat_save=["q"]', 'model.remat_offload=["q"]'],
            ["both have q"],
        ),
        (["model.dropout=1"], ["model.dropout", "[0, 1)"]),
        (["model.seq_len=0"], ["model.seq_len", "at least 2"]),
        (["model.num_layers=0"], ["model.num_layers", "at least 1"]),
        (["model.embed_dim=0"], ["model.embed_dim", "at least 1"]),
        (["model.num_heads=0"], ["model.num_heads", "at least 1"]),
        (["model.seq_len=3000000000"], ["model.seq_len"]),
        (["model.aux_layers=[6]"], ["1 to 5"]),
        (["checkpoint.keep=0"], ["checkpoint.keep"]),
        (["data.store={a=0}"], ["above 0"]),
        (["data.stages={\"0\" = {a = 1.0}}"], ["data.stages['0']", "at least 1"]),
        (["data.stages={\"9\" = {a = -1.0}}"], ["data.stages['9']['a'] = -1.0", "above 0"]),
        (["data.stages={\"9\" = {}}"], ["data.stages['9'] is empty"]),
        (["data.min_bytes=9", "data.max_bytes=8"], ["data.max_bytes = 8", "data.min_bytes = 9"]),
        (["model.seq_len=1"], ["model.seq_len = 1", "at least 2"]),
        (["data.max_epochs=-1"], ["data.max_epochs = -1.0"]),
        (["checkpoint.allow_change=[\"everything\"]"], ["data, mixture, tokenizer, seed, optim"]),
        (["model.num_experts=2", "model.experts_per_token=3"], ["= 3", "experts = 2"]),
        (["model.num_experts=4", "model.mlp_bias=true"], ["model.mlp_bias"]),
        (["model.aux_layers=[1, 2]", "train.aux_loss_weights=[1, 2, 3]"], ["of the 2"]),
    ],
)  # fmt: skip
def test_combinations_that_cannot_work_are_refused_with_the_numbers(overrides, words):
    problem = refused(*overrides)[0]
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize("field", [
    "experts_per_token=1", "expert_dim=8", "shared_dim=8", 'router="sigmoid"', "router_norm=false",
    "router_bias=true", "capacity_factor=1.5",
])  # fmt: skip
def test_fields_of_experts_are_refused_without_experts(field):
    problem = f"model.{field.replace('=', ' = ')}: needs model.num_experts"
    assert refused(f"model.{field}") == [problem]


def test_a_negative_number_of_experts_is_refused_once():
    assert refused("model.num_experts=-1") == ["model.num_experts = -1: must be at least 0"]


def test_a_router_whose_only_score_is_divided_by_itself_is_not_trained():
    one = ["model.num_experts=4", "model.experts_per_token=1"]
    (problem,) = refused(*one, "train.num_steps=9")
    assert "model.router_norm = true" in problem and "model.experts_per_token = 1" in problem
    for others in (
        ["model.router_norm=false", "train.num_steps=9"],
        ["model.num_experts=1", "train.num_steps=9"],  # nothing to choose
        [],  # nothing to train, as after an import
    ):
        config.load(None, one + others)


def test_a_warm_up_as_long_as_the_run_is_a_plain_ramp_and_accepted():
    assert (
        config.load(None, ["optim.warmup_steps=10", "train.num_steps=10"]).optim.warmup_steps == 10
    )


def test_a_token_budget_becomes_whole_steps():
    from jaxgpt.validation import num_steps

    # 1,000 tokens at 4 rows of 16 tokens are 15.6 steps, so 16.
    overrides = ["train.num_tokens=1000", "train.global_batch=4", "model.seq_len=16"]
    assert num_steps(config.load(None, overrides)) == 16


def test_written_toml_reads_back_to_the_same_configuration():
    cfg = config.load(
        None, ['data.store={"a b" = 1.5}', "run.dir=run \u2028 #1", "model.aux_layers=[2]"]
    )
    text = config.to_toml(cfg)
    assert config.from_dict(tomllib.loads(text)) == cfg
    assert "# override" in text
    assert config.from_dict(config.to_dict(cfg)) == cfg


def test_the_configuration_of_an_earlier_version_is_read():
    saved = {"train": {"aux_loss_weight": 0.5, "num_steps": 3}}
    cfg = config.from_dict(saved)
    assert (cfg.train.aux_loss_weights, cfg.train.num_steps) == ((0.5,), 3)


def test_every_field_has_a_meaning():
    for section in config.SECTIONS:
        for field, _ in config.fields_of(section):
            assert field.metadata["meaning"].strip(), f"{section}.{field.name}"


def test_the_field_budget_holds():
    assert sum(1 for section in config.SECTIONS for _ in config.fields_of(section)) < 130


@pytest.mark.parametrize(
    "batch, done, position, steps",
    [
        (4, 0, 0, 25),  # 40 tokens a step
        (4, 10, 40, 25),
        (8, 10, 40, 18),  # 600 tokens are left, 80 a step
        (3, 10, 40, 30),
        (8, 25, 100, 25),
    ],
)
def test_a_budget_of_tokens_is_kept_when_the_batch_changes(batch, done, position, steps):
    words = ["train.num_tokens=1000", "model.seq_len=10", f"train.global_batch={batch}"]
    cfg = config.load(None, [*words, "optim.warmup_steps=1"])
    assert num_steps(cfg, done, position) == steps


@pytest.mark.parametrize("word", ["<a>,<b>", "[<a>, <b>]", '["<a>", "<b>"'])
def test_words_meant_as_a_list_are_not_taken_for_one_string(word):
    (problem,) = refused(f"tokenizer.user_symbols={word}")
    assert """write 'tokenizer.user_symbols=["<a>", "<b>"]', quotes and all""" in problem
