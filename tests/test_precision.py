"""`dtype: auto`, emulated types and the shipped configs, on both kinds of CPU whatever machine runs the tests."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F

from helpers import make_batch
from pbrl_lightning import (
    JointRewardModel,
    JointRewardModule,
    MARLHFModule,
    MARLModule,
    ModelComparator,
    PreferenceDataModule,
)
from pbrl_lightning.acceleration import precision
from pbrl_lightning.acceleration.precision import choose_dtype, cpu_support, cuda_support, product_ratio
from pbrl_lightning.agents import products
from pbrl_lightning.agents.products import ready_products, scoring_products
from pbrl_lightning.agents.sampling import SamplingConfig
from pbrl_lightning.checkpoints import dtype_of_checkpoint
from pbrl_lightning.cli import main
from pbrl_lightning.models.critic import JointCritic, SeparateCritics
from training_runs import (
    ITEMS,
    SAMPLING,
    make_data,
    make_module,
    make_team,
    make_trainer,
    same_weights,
    text_reward,
    weights_of,
)

ROOT = Path(__file__).parent.parent
NATIVE, EMULATING = {"avx2", "avx512_bf16"}, {"avx2"}
WARNING = r"asks for {}, which the CPU does not multiply natively: a product of 256 x 256 x 256 took \d+\.\d times"


@pytest.fixture
def cpu(monkeypatch):
    """Makes the CPU one with these features only, and lets every warning come again."""
    for variable in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(precision, "_warned", set())

    def be(features):
        monkeypatch.setattr(precision, "_cpu", lambda: (frozenset(features), "CPU"))

    return be


@pytest.fixture
def every_size(monkeypatch):
    monkeypatch.setattr(products, "SMALLEST", 1)


def dtypes_of(*models):
    return {parameter.dtype for model in models for parameter in model.parameters() if parameter.dim() > 1}


@pytest.mark.parametrize(
    ("features", "max_isa", "native"),
    [
        ({"avx2", "fma"}, "", set()),
        ({"avx2", "avx512f", "avx512_vnni"}, "", set()),  # oneDNN calls bfloat16 supported here, and emulates it
        ({"avx512_bf16"}, "", {"bfloat16"}),
        ({"amx_bf16", "avx512_bf16", "avx512_fp16"}, "", {"bfloat16", "float16"}),
        ({"amx_bf16", "avx512_bf16", "avx512_fp16"}, "AVX2", set()),
        ({"amx_bf16", "avx512_bf16", "avx512_fp16"}, "avx512_core_vnni", set()),
        ({"amx_bf16", "avx512_bf16", "avx512_fp16"}, "AVX512_CORE_BF16", {"bfloat16"}),
        ({"amx_bf16", "avx512_bf16", "avx512_fp16"}, "ALL", {"bfloat16", "float16"}),
        ({"asimd", "bf16"}, "", {"bfloat16"}),
        ({"asimd", "asimdhp"}, "", {"float16"}),
    ],
)
def test_what_a_cpu_multiplies_natively(features, max_isa, native):
    support = cpu_support(features, max_isa)
    assert set(support.reasons) == native
    assert [support.is_native(dtype) for dtype in (torch.float32, torch.float64)] == [True, True]
    assert support.is_native(torch.bfloat16) == ("bfloat16" in native)
    assert choose_dtype(support)[0] == ("bfloat16" if "bfloat16" in native else "float32")


@pytest.mark.parametrize(("capability", "chosen"), [((6, 1), "float32"), ((7, 5), "float32"), ((8, 0), "bfloat16")])
def test_what_a_gpu_multiplies_natively(capability, chosen):
    support = cuda_support(capability, "GPU")
    assert choose_dtype(support)[0] == chosen
    assert support.is_native(torch.float16) == (capability[0] >= 7)


def test_reasons_are_sentences():
    assert choose_dtype(cpu_support({"avx512_bf16", "amx_bf16"}, name="CPU (X)"))[1] == (
        "the CPU (X) multiplies it natively (avx512_bf16, amx_bf16)"
    )
    assert choose_dtype(cpu_support({"avx2"}))[1] == (
        "the CPU has no bfloat16 instructions (avx512_bf16, amx_bf16, bf16, svebf16)"
    )
    assert choose_dtype(cpu_support({"amx_bf16"}, "AVX2"))[1] == (
        "the CPU has no bfloat16 instructions under ONEDNN_MAX_CPU_ISA=AVX2"
    )
    assert choose_dtype(cuda_support((7, 5), "T4"))[1] == "the T4 has compute capability 7.5, below 8"


def test_a_device_that_was_not_tried_gets_float32_and_no_warning():
    support = precision.device_support("meta")
    assert choose_dtype(support) == ("float32", "the meta was not tried")
    assert support.is_native(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_emulated_products_are_exact_products_of_narrow_numbers_rounded_once(cpu, every_size, dtype, bias):
    cpu(EMULATING)
    narrow, inputs = nn.Linear(48, 80, bias=bias).to(dtype), torch.randn(40, 48).to(dtype)
    exact = F.linear(*(x.double() for x in (inputs, narrow.weight, *([narrow.bias] if bias else []))))
    with ready_products(narrow):
        found = narrow(inputs)
        assert narrow.forward.keywords["product"].keywords["dtype"] == torch.float32
    assert found.dtype == dtype
    # Where float32 sums end on the other side of a boundary between two narrow numbers, the neighbor is taken.
    assert (found == exact.to(dtype)).float().mean() > 0.99
    assert ((found.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-5).all()

    wide = nn.Linear(48, 80, bias=bias)  # of a model in float32, whose products are asked for in the narrow type
    with ready_products(wide, dtype):
        found = wide(inputs.float())
    exact = F.linear(*(x.to(dtype).double() for x in (inputs, wide.weight, *([wide.bias] if bias else []))))
    assert found.dtype == torch.float32
    assert (found == exact.to(dtype).float()).float().mean() > 0.99


@torch.no_grad()
def test_native_products_and_large_models_are_multiplied_in_the_narrow_type(cpu, every_size, monkeypatch):
    layer, inputs = nn.Linear(48, 80).bfloat16(), torch.randn(5, 48).bfloat16()
    cpu(NATIVE)
    with ready_products(layer):
        assert layer.forward.keywords["dtype"] == torch.bfloat16
        assert "dtype" not in layer.forward.keywords["product"].keywords
    assert "forward" not in layer.__dict__
    cpu(EMULATING)
    size = layer.weight.numel()
    for memory, copied in ((4 * 4 * size, False), (4 * 4 * size + 4, True)):  # the copies are float32
        monkeypatch.setattr(products, "device_memory", lambda _device, memory=memory: memory)
        with ready_products(layer):
            assert ("forward" in layer.__dict__) == copied
            assert layer(inputs).dtype == torch.bfloat16


def test_scoring_multiplies_copies_only_where_nothing_is_differentiated(cpu, every_size, monkeypatch):
    batch = make_batch([[5, 6, 7], [8, 9]], [[10, 11, 12], [13, 14]])
    team = make_team(dtype="bfloat16", num_agents=1).load()
    reward = JointRewardModel("builtin:tiny", dtype="bfloat16").load()
    entered, original = [], products.ready_products
    monkeypatch.setattr(products, "ready_products", lambda model: entered.append(model) or original(model))
    for features, copies in ((NATIVE, 0), (EMULATING, 2)):
        cpu(features)
        plain = [team.response_logps(0, batch), reward(batch)]
        assert (all(scores.requires_grad for scores in plain), entered) == (True, [])
        with torch.no_grad():
            fast = [team.response_logps(0, batch), reward(batch)]
        assert len(entered) == copies
        for scores, others in zip(fast, plain, strict=True):
            assert (scores - others).abs().max() < 0.03 * (1 + others.abs().max())
    assert not any("forward" in module.__dict__ for module in (*team.modules(), *reward.modules()))
    assert type(scoring_products(nn.Identity())).__name__ == "nullcontext"


PROGRAM = """
import torch, warnings
from pbrl_lightning import AgentTeam
from pbrl_lightning.acceleration.precision import device_support, is_emulated
from pbrl_lightning.agents import products
products.SMALLEST = 1
team = AgentTeam("builtin:tiny", num_agents=1, dtype="auto").load()
print(team.dtype, is_emulated(torch.bfloat16, "cpu"), torch.backends.cpu.get_cpu_capability())
narrow = AgentTeam("builtin:tiny", num_agents=1, dtype="bfloat16").load()
with products.ready_products(narrow.model(0)):
    print(narrow.model(0).lm_head.forward.keywords["product"].keywords.get("dtype"))
"""


@pytest.mark.slow
def test_environment_variables_make_any_x86_cpu_an_avx2_one():
    limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | limits, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    chosen, emulated, capability, copies = done.stdout.split()
    assert (chosen, emulated, copies) == ("float32", "True", "torch.float32")
    assert capability in ("AVX2", "DEFAULT")
    assert "dtype auto: float32, because the CPU" in done.stderr
    assert re.search(r"asks for bfloat16, which the CPU.* took \d+\.\d times as long as in float32", done.stderr)


@pytest.mark.parametrize(("features", "chosen"), [(NATIVE, "bfloat16"), (EMULATING, "float32")])
def test_auto_without_a_run_is_chosen_for_the_cpu_or_the_device_given(cpu, monkeypatch, features, chosen):
    cpu(features)
    team, reward = make_team(dtype="auto"), JointRewardModel("builtin:tiny", dtype="auto")
    assert (team.dtype, reward.dtype) == ("auto", "auto")
    assert dtypes_of(team.load()) == {getattr(torch, chosen)}
    assert reward.load().dtype == team.dtype == chosen
    assert next(reward.classifier.parameters()).dtype == getattr(torch, chosen)
    other = make_team(dtype="auto")
    monkeypatch.setattr(precision, "device_support", lambda _device: cuda_support((8, 0)))
    assert other.load("cuda").dtype == "bfloat16"


@pytest.mark.parametrize(("features", "chosen"), [(NATIVE, "bfloat16"), (EMULATING, "float32")])
def test_a_run_chooses_once_for_all_its_models(cpu, tmp_path, caplog, features, chosen):
    cpu(features)
    critic, reward = SeparateCritics("builtin:tiny", dtype="auto"), JointRewardModel("builtin:tiny", dtype="auto")
    module = MARLHFModule(make_team(dtype="auto"), reward_model=reward, critic=critic, rl_algorithm="iac")
    comparator = ModelComparator("builtin:tiny", dtype="auto")
    make_trainer(tmp_path, fast_dev_run=True).fit(module, make_data(comparator=comparator))
    assert module.auto_dtype == module.team.dtype == reward.dtype == critic.dtype == chosen
    backbones = [reward.classifier, *(model.classifier for model in critic.models)]
    assert dtypes_of(module.team, comparator._team, *backbones) == {getattr(torch, chosen)}
    assert [line for line in caplog.messages if line.startswith("dtype auto")] == [
        f"dtype auto: {chosen}, because the CPU "
        + ("multiplies it natively (avx512_bf16)" if chosen == "bfloat16" else
           "has no bfloat16 instructions (avx512_bf16, amx_bf16, bf16, svebf16)")
    ]  # fmt: skip


def test_a_given_type_is_left_alone_and_nothing_is_printed(cpu, tmp_path, caplog):
    cpu(NATIVE)
    module = make_module()
    make_trainer(tmp_path, fast_dev_run=True).fit(module, make_data())
    assert (module.auto_dtype, module.run_dtype) == (None, "float32")
    assert dtypes_of(module.team) == {torch.float32}
    assert not [line for line in caplog.messages if "dtype" in line]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(("first", "then", "kept"), [
    (NATIVE, EMULATING, "bfloat16"), (EMULATING, NATIVE, "float32")
], ids=["bfloat16", "float32"])  # fmt: skip
def test_a_run_resumes_on_another_cpu_in_the_precision_of_its_checkpoint(
    cpu, tmp_path, caplog, first, then, kept, lora
):
    def fit(name, rounds, ckpt_path=None):
        module = make_module(make_team(dtype="auto", lora=lora), rounds=rounds)
        saver = ModelCheckpoint(tmp_path / name, "end", save_top_k=-1)
        trainer = make_trainer(tmp_path / name, [saver], max_epochs=-1, enable_checkpointing=True)
        trainer.fit(module, make_data(replay_dir=str(tmp_path / "replay")), ckpt_path=ckpt_path)
        return module

    cpu(first)
    fit("first", 1)
    path = tmp_path / "first" / "end.ckpt"
    assert dtype_of_checkpoint(path) == kept
    cpu(then)
    caplog.clear()
    resumed = fit("second", 2, path)
    assert resumed.auto_dtype == resumed.team.dtype == kept
    assert {p.dtype for p in resumed.team.parameters() if not lora or not p.requires_grad} == {getattr(torch, kept)}
    assert f"dtype auto: {kept}, because the checkpoint says so" in caplog.messages
    # Weights, optimizer and round files fit together: the run is the one that was never moved.
    cpu(first)
    again = fit("third", 2, path)
    if kept == "float32":  # in bfloat16 the two CPUs' products are rounded differently
        assert same_weights(weights_of(again.team), weights_of(resumed.team))


def test_models_of_all_kinds_are_loaded_again_in_the_precision_of_a_checkpoint(cpu):
    cpu(EMULATING)
    critic, reward = JointCritic("builtin:tiny", dtype="auto"), JointRewardModel("team")
    module = MARLHFModule(make_team(dtype="auto", lora=True), reward_model=reward, critic=critic, rl_algorithm="maac")
    module._trainer = SimpleNamespace(strategy=SimpleNamespace(
        root_device=torch.device("cpu"), broadcast=lambda value: value, restore_checkpoint_after_setup=False
    ))  # fmt: skip
    module.settle_dtype()
    module.load()
    assert dtypes_of(module.team) == {torch.float32}
    module.take_dtype("bfloat16")
    module.load()
    assert next(module.team.parameters()).dtype == torch.bfloat16
    assert next(critic.models[0].classifier.parameters()).dtype == torch.bfloat16
    assert "reward_0" in module.team.backbone(0).peft_config
    assert reward.trained_parameters()[0].dtype == torch.float32  # an adapter
    module._trainer.strategy.restore_checkpoint_after_setup = True
    with pytest.raises(ValueError, match=r"`dtype: auto` is bfloat16 .* is in float32; set `dtype: float32`"):
        module.take_dtype("float32")


def test_a_checkpoint_that_says_nothing_or_is_no_file_decides_nothing(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "old.ckpt")
    (tmp_path / "broken.ckpt").write_bytes(b"no checkpoint")
    for name in ("old.ckpt", "broken.ckpt", "missing.ckpt"):
        assert dtype_of_checkpoint(tmp_path / name) is None


def test_the_saved_config_says_the_type_and_a_resumed_one_that_of_the_checkpoint(cpu, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    config, team = str(ROOT / "configs/debug/madpo_iter.yaml"), "--model.init_args.team.init_args"
    options = ["--config", config, f"{team}.dtype=auto", "--data.num_candidates=4", "--trainer.default_root_dir=."]
    cpu(NATIVE)
    main(["fit", *options, "--model.init_args.num_iterations=1"])
    assert "dtype auto: bfloat16, because the CPU multiplies it natively (avx512_bf16)" in caplog.messages
    cpu(EMULATING)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        main(["fit", *options, "--model.init_args.num_iterations=2", "--ckpt_path=lightning_logs/version_0"])
    assert "dtype auto: bfloat16, because the checkpoint says so" in caplog.messages
    saved = sorted(Path("lightning_logs").rglob("config*.yaml"))
    assert len(saved) == 2
    for path in saved:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert document["model"]["init_args"]["team"]["init_args"]["dtype"] == "bfloat16"
    assert len([w for w in caught if re.search(WARNING.format("bfloat16"), str(w.message))]) == 1
    # Its exported agents answer in the precision that they were trained in.
    main(["sample", "--run=lightning_logs/version_0", "--output=answers.jsonl"])
    assert len(Path("answers.jsonl").read_text(encoding="utf-8").splitlines()) > 1


FITS = {
    "team": ({"dtype": "bfloat16"}, {}, {}, "bfloat16", "`dtype` of the models"),
    "float16": ({"dtype": "float16"}, {}, {}, "float16", "`dtype` of the models"),
    "sampling": ({}, {"dtype": "bfloat16"}, {}, "bfloat16", "`sampling.dtype`"),
    "mixed": ({}, {}, {"precision": "bf16-mixed"}, "bfloat16", "`trainer.precision: bf16-mixed`"),
    "true": ({}, {}, {"precision": "bf16-true"}, "bfloat16", "`trainer.precision: bf16-true`"),
}


@pytest.mark.parametrize("name", FITS)
def test_an_emulated_type_is_warned_of_once_with_the_measured_ratio(cpu, tmp_path, name):
    team, sampling, trainer, dtype, option = FITS[name]

    def warned(features):
        cpu(features)
        data = make_data(sampling=SamplingConfig(**{**vars(SAMPLING), **sampling}))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer(tmp_path, fast_dev_run=True, **trainer).fit(make_module(make_team(**team)), data)
        return [str(w.message) for w in caught if "natively" in str(w.message)]

    (message,) = warned(EMULATING)
    assert re.search(re.escape(option) + " " + WARNING.format(dtype), message)
    precision._warned.clear()
    assert warned({*NATIVE, "avx512_fp16"}) == []


def fit_reward(root):
    module = JointRewardModule(JointRewardModel("builtin:tiny", dtype="bfloat16"))
    data = PreferenceDataModule(pairs=["package:pbrl_lightning/tasks/data/writing_pairs.json"])
    make_trainer(root, fast_dev_run=True).fit(module, data)


def fit_critic(root):
    module = MARLModule(make_team(), rl_algorithm="maac", critic=JointCritic("builtin:tiny", dtype="bfloat16"))
    data = PreferenceDataModule(ITEMS, text_reward, sampling=SAMPLING)
    make_trainer(root, fast_dev_run=True).fit(module, data)


def sample_narrow(_root):
    how = {"num_candidates": 1, "sampling": SAMPLING, "seed": 0, "stream": "evaluation"}
    make_team(dtype="bfloat16").sample(ITEMS[:1], [0], **how)


def score_texts(_root):
    JointRewardModel("builtin:tiny", dtype="bfloat16").score_texts(["a"], ["b"], prompts=[["c"], ["d"]])


def place(_root):
    make_team(dtype="bfloat16").place(["cpu"])


@pytest.mark.parametrize("use", [fit_reward, fit_critic, sample_narrow, score_texts, place])
def test_an_emulated_type_is_warned_of_wherever_it_comes_in(cpu, tmp_path, use):
    cpu(EMULATING)
    with pytest.warns(UserWarning, match="`dtype` of the models " + WARNING.format("bfloat16")):
        use(tmp_path)


def test_the_ratio_of_a_small_product_is_measured():
    assert 0.2 < product_ratio(torch.float32, "cpu") < 5
    assert product_ratio(torch.float64, "cpu") > 0


def types_in(document):
    """Every value of a key ``dtype`` and ``precision`` in a config."""
    if isinstance(document, list):
        return [found for entry in document for found in types_in(entry)]
    if not isinstance(document, dict):
        return []
    own = [value for key, value in document.items() if key in ("dtype", "precision")]
    return own + [found for value in document.values() for found in types_in(value)]


CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
CHOOSING = [path for path in CONFIGS if path.parent.name in ("configs", "tasks")]
PINNED = [path for path in CONFIGS if path.parent.name in ("results", "debug")]


def test_there_are_configs_of_both_kinds():
    assert len(CHOOSING) >= 18
    assert len(PINNED) >= 21


@pytest.mark.parametrize("path", CHOOSING, ids=lambda path: path.stem)
def test_shipped_configs_let_the_machine_choose(path):
    assert types_in(yaml.safe_load(path.read_text(encoding="utf-8"))) == ["auto"]


@pytest.mark.parametrize("path", PINNED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_results_and_smoke_runs_pin_a_type(path):
    """Without an option the type is the default, float32."""
    wanted = ["bfloat16"] if path.stem.startswith("smollm2") else []
    assert types_in(yaml.safe_load(path.read_text(encoding="utf-8"))) == wanted
