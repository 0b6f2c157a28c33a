"""The patch's settings and entry point without vLLM: nothing raises, every fault is named."""

import logging
import subprocess
import sys

import pytest

from engine_patch import plugin
from engine_patch.policy import POLICIES
from engine_patch.settings import EngineSettings


def test_defaults_decide_among_lru_s3fifo_and_arc() -> None:
    """Without variables the engine starts in auto mode, with no faults."""
    settings = EngineSettings.from_env({"PATH": "/bin", "VLLM_PLUGINS": "wakman"})
    assert settings == EngineSettings()
    assert (settings.policy, settings.policies, settings.faults) == ("auto", ("lru", "s3fifo", "arc"), ())


def test_every_setting_is_read() -> None:
    """Each variable reaches its field, in its type."""
    settings = EngineSettings.from_env(
        {
            "WAKMAN_POLICY": "s3fifo-25",
            "WAKMAN_POLICIES": "lru, arc,lru",
            "WAKMAN_PRESET": "paper",
            "WAKMAN_CONTROL_FILE": "/run/wakman",
            "WAKMAN_INTERVAL_S": "1.5",
            "WAKMAN_MARGIN": "0",
            "WAKMAN_DWELL_S": "0",
            "WAKMAN_RESIDUAL": "0.02",
            "WAKMAN_SAMPLE": "0.05",
            "WAKMAN_SELF_CHECK_S": "0",
            "WAKMAN_FORCE": "1",
        }
    )
    assert settings == EngineSettings(
        "s3fifo-25", ("lru", "arc"), "paper", 1.5, 0.0, 0.0, 0.02, 0.05, "/run/wakman", 0.0, True
    )


@pytest.mark.parametrize("policy", ["auto", "off", *POLICIES])
def test_every_policy_can_be_asked_for(policy: str) -> None:
    """WAKMAN_POLICY takes each policy, auto and off."""
    settings = EngineSettings.from_env({"WAKMAN_POLICY": policy})
    assert (settings.policy, settings.faults) == (policy, ())


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WAKMAN_POLICY", "lfu", "unknown policy; there are auto, off, lru"),
        ("WAKMAN_POLICY", "", "unknown policy"),
        ("WAKMAN_POLICIES", "lru,lfu", "unknown policy 'lfu'"),
        ("WAKMAN_POLICIES", "s3fifo,arc", "must hold lru"),
        ("WAKMAN_POLICIES", "lru", "two policies"),
        ("WAKMAN_PRESET", "fast", "unknown preset; there are default, paper"),
        ("WAKMAN_MARGIN", "nan", "must be from 0 to 1"),
        ("WAKMAN_MARGIN", "1 %", "must be a number"),
        ("WAKMAN_INTERVAL_S", "0.01", "must be from 0.1 to 86400"),
        ("WAKMAN_INTERVAL_S", "inf", "must be from 0.1 to 86400"),
        ("WAKMAN_FORCE", "yes", "must be 0 or 1"),
        ("WAKMAN_CONTROL_FILE", "wakman.json", "must be an absolute path"),
        ("WAKMAN_POLLICY", "lru", "no setting of this version (there are WAKMAN_POLICY,"),
        ("WAKMAN_policy", "lru", "no setting of this version"),
        ("WAKMAN_FAULTS", "x", "no setting of this version"),
    ],
)
def test_a_bad_setting_is_named_and_never_raises(name: str, value: str, said: str) -> None:
    """A name or value that is wrong stands in the faults, by its name, with what would be right."""
    (fault,) = EngineSettings.from_env({name: value}).faults
    assert name in fault
    assert said in fault


def test_all_faults_are_told_at_once() -> None:
    """Two wrong settings are two faults; a long value is cut."""
    faults = EngineSettings.from_env({"WAKMAN_MARGIN": "9" * 500, "WAKMAN_PRESET": "x"}).faults
    assert len(faults) == 2
    assert all(len(fault) < 200 for fault in faults)


def test_a_kubernetes_service_called_wakman_is_no_setting() -> None:
    """The links that Kubernetes puts into a pod for a Service called wakman are passed over."""
    links = {
        "WAKMAN_SERVICE_HOST": "10.0.0.7",
        "WAKMAN_SERVICE_PORT": "9090",
        "WAKMAN_SERVICE_PORT_HTTP": "9090",
        "WAKMAN_PORT": "tcp://10.0.0.7:9090",
        "WAKMAN_PORT_9090_TCP_ADDR": "10.0.0.7",
    }
    assert EngineSettings.from_env(links).faults == ()


def test_register_without_vllm_says_so_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where vLLM cannot be imported the plugin logs a line for each half, keeps the reason, and returns."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(plugin, "failure", "")
    with caplog.at_level(logging.WARNING, logger="vllm.wakman"):
        plugin.register()
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "wakman: no control over RPC: EngineCore cannot be extended",
        "wakman: not attached: vLLM's scheduler cannot be wrapped",
    ]
    assert plugin.failure.startswith("vLLM's scheduler cannot be wrapped (ModuleNotFoundError: ")


@pytest.mark.parametrize("half", ["control", "attach"])
def test_one_half_of_the_plugin_does_not_hang_on_the_other(monkeypatch: pytest.MonkeyPatch, half: str) -> None:
    """When control or attach cannot be installed, the other still is."""
    done: list[str] = []

    def broken() -> None:
        raise AttributeError("moved")

    for name in ("control", "attach"):
        install = broken if name == half else lambda name=name: done.append(name)
        monkeypatch.setattr(f"engine_patch.{name}.install", install)
    monkeypatch.setattr(plugin, "failure", "")
    plugin.register()
    assert done == [{"control": "attach", "attach": "control"}[half]]
    assert bool(plugin.failure) == (half == "attach")


def test_the_plugin_is_imported_with_the_standard_library_and_numpy_alone() -> None:
    """Importing what vLLM loads pulls in nothing that its environment may lack, and not vLLM itself."""
    code = (
        "import sys; import engine_patch.plugin, engine_patch.attach; "
        "print(sorted({m.partition('.')[0] for m in sys.modules} & "
        "{'vllm', 'torch', 'fastapi', 'prometheus_client', 'opentelemetry', 'pydantic', 'structlog'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
