"""The files of configs/accelerate say what accelerate understands, and what cannot be had is refused."""

import os
from pathlib import Path

import pytest
import toy

from genrl.training.errors import SetupError
from genrl.training.policy_settings import PolicyTrainerSettings
from genrl.training.processes import make_accelerator, plan

FOLDER = Path(__file__).parents[2] / "configs" / "accelerate"
FILES = sorted(FOLDER.glob("*.yaml"))
PLANS = {"fsdp2": "fsdp2", "deepspeed": "zero2", "ddp": "copies", "cpu": "copies"}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_every_key_is_known_to_accelerate(file):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    config = load_config_from_file(str(file))  # refuses unknown keys of the first level
    options = {action.dest for action in launch_command_parser()._actions}
    for section in (config.fsdp_config, config.deepspeed_config):
        assert section.keys() <= options
    assert config.mixed_precision == "no"  # precision is the run's own setting
    assert str(config.num_processes) in file.stem or config.num_machines == 2
    text = file.read_text()
    assert text.startswith("# ") and f"configs/accelerate/{file.name}" in text
    assert "has been run" in text or "_cpu_" in f"_{file.stem}_"


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_a_launch_with_the_file_is_understood(file, monkeypatch):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    arguments = launch_command_parser().parse_args(["--config_file", str(file), "script.py"])
    arguments, *_ = _validate_launch_command(arguments)
    arguments.deepspeed_fields_from_accelerate_config = ""
    prepare = prepare_deepspeed_cmd_env if arguments.use_deepspeed else prepare_multi_gpu_env
    found = prepare(arguments)
    environment = found[1] if isinstance(found, tuple) else found
    for name in [n for n in os.environ if n.startswith(("ACCELERATE_", "FSDP_"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        if name.startswith(("ACCELERATE_", "FSDP_")):
            monkeypatch.setenv(name, value)
    assert plan(toy.trainer()) == PLANS[file.stem.split("_")[0]]
    assert plan(toy.trainer(sharding="none")) == "copies"


@pytest.mark.parametrize(
    ("variables", "settings", "message"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, {}, "fsdp_version = 1 .* set it to 2"),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_RESHARD_AFTER_FORWARD": "false"},
            {},
            "fsdp_reshard_after_forward = false .* set it to true",
        ),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_ACTIVATION_CHECKPOINTING": "true"},
            {},
            "checkpointing is the generator's switch",
        ),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, {}, "zero_stage = 3 .* fsdp2"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"},
            {},
            "asks DeepSpeed to off-load",
        ),
        ({}, {"sharding": "fsdp2", "mixed_precision": "fp16"}, "fp16 with fsdp2: use bf16 or no"),
        ({}, {"sharding": "zero2", "mixed_precision": "fp16"}, "fp16 with zero2: use bf16 or no"),
    ],
)
def test_what_would_not_be_had_is_refused(monkeypatch, variables, settings, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SetupError, match=message):
        make_accelerator(toy.trainer(**settings))


def test_policies_refuse_files_for_shards(monkeypatch):
    assert plan(PolicyTrainerSettings()) == "copies"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(SetupError, match="whole copy on every process"):
        plan(PolicyTrainerSettings())


def test_one_process_has_nothing_to_divide_and_the_wish_stays_known(monkeypatch):
    from genrl.training.processes import Copies, make_sharing

    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    accelerator = make_accelerator(toy.trainer())
    assert type(make_sharing(accelerator, toy.trainer())) is Copies
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"  # else other processes load empty models
