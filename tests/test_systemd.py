"""The unit files, read by systemd's own tools."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from edged.cli.exits import CONFIGURATION, USAGE

UNITS = Path(__file__).parent.parent / "systemd"

# systemd-analyze rates a service from 0 (sealed) to 10 (open); anything up to 3 it calls "OK".
EXPOSURE_LIMIT_TENTHS = 30


@pytest.fixture
def analyze(require, tmp_path):
    """Runs systemd-analyze on a copy of the units whose ExecStart exists here."""
    tool = require("systemd-analyze")
    units = tmp_path / "units"
    units.mkdir()
    for name in ("edged.service", "edged.socket"):
        text = (UNITS / name).read_text()
        (units / name).write_text(text.replace("/opt/edged/bin/edged", shutil.which("true")))

    def run(*arguments):
        return subprocess.run(
            [tool, "--no-pager", *arguments],
            env={**os.environ, "SYSTEMD_UNIT_PATH": f"{units}:"},
            cwd=units,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return units, run


def add_gpu_drop_in(units):
    (units / "edged.service.d").mkdir()
    shutil.copy(UNITS / "gpu.conf", units / "edged.service.d" / "gpu.conf")


def settings(name):
    """The last value of each key of a unit; systemd's format is close enough to an INI file."""
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str
    parser.read(UNITS / name)
    return parser


@pytest.mark.parametrize("gpu", [False, True])
def test_systemd_accepts_the_units_without_a_word(analyze, gpu):
    units, run = analyze
    if gpu:
        add_gpu_drop_in(units)
    result = run(
        "verify", "--man=no", "--recursive-errors=no", str(units / "edged.service"), str(units / "edged.socket")
    )
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_verify_would_notice_a_misspelt_key(analyze):
    units, run = analyze
    with (units / "edged.service").open("a") as file:
        file.write("[Service]\nProtectSytem=strict\n")
    assert "ProtectSytem" in run("verify", "--man=no", "--recursive-errors=no", str(units / "edged.service")).stderr


def test_the_service_is_sealed(analyze):
    units, run = analyze
    service = str(units / "edged.service")
    result = run("security", "--offline=true", f"--threshold={EXPOSURE_LIMIT_TENTHS}", service)
    assert result.returncode == 0, result.stdout


def test_exits_that_a_restart_cannot_mend_do_not_restart():
    assert settings("edged.service")["Service"]["RestartPreventExitStatus"].split() == [str(USAGE), str(CONFIGURATION)]


def test_service_and_socket_agree_on_the_folder():
    folder = settings("edged.service")["Service"]["RuntimeDirectory"]
    assert settings("edged.socket")["Socket"]["ListenStream"] == f"/run/{folder}/edged.sock"


def test_users_and_folders_are_made_as_the_units_expect(require, tmp_path):
    require("systemd-analyze")  # the package that brings the two tools below
    if os.geteuid() != 0:
        pytest.skip("only root can give files to another user")
    (tmp_path / "etc").mkdir()
    for tool, name in (("systemd-sysusers", "sysusers.conf"), ("systemd-tmpfiles", "tmpfiles.conf")):
        arguments = [tool, f"--root={tmp_path}", *(["--create"] if tool == "systemd-tmpfiles" else []), UNITS / name]
        subprocess.run(arguments, check=True, timeout=60)
    user = next(line for line in (tmp_path / "etc/passwd").read_text().splitlines() if line.startswith("edged:"))
    uid, gid = (int(field) for field in user.split(":")[2:4])
    status = (tmp_path / "run/edged").stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (uid, gid, 0o755)
