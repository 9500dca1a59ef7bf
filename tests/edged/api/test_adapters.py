from __future__ import annotations

import asyncio
import io
import tarfile
from pathlib import Path

from tests.edged.api.light_server import serving


def test_versions_are_listed_with_the_live_one(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            body = (await light.unix.get("/v1/adapters")).json()

        assert body["live"]["version"] == 3
        assert body["live"]["since"] == "2023-11-14T22:13:23.500Z"
        assert [(a["version"], a["live"]) for a in body["data"]] == [(0, False), (1, False), (2, False), (3, True)]

    asyncio.run(run())


def test_promote_and_roll_back_change_what_is_live(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            promoted = (await light.unix.post("/v1/adapters/1/promote")).json()
            rolled = (await light.unix.post("/v1/adapters/rollback", json={"if_live": 1})).json()

        assert (promoted["version"], promoted["why"]) == (1, "promoted")
        assert (rolled["version"], rolled["why"]) == (0, "rolled_back")

    asyncio.run(run())


def test_if_live_is_compare_and_swap_on_every_route_that_changes_what_is_served(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            for path, body in {
                "/v1/adapters/1/promote": {},
                "/v1/adapters/rollback": {},
                "/v1/adapters/1/pin": {},
                "/v1/adapters/import": {"folder": "/srv/adapters/x"},
            }.items():
                answer = await light.unix.post(path, json={**body, "if_live": 2})
                assert (answer.status_code, answer.json()["error"]["code"]) == (409, "live_changed")
            assert light.control.live.version == 3
            assert [adapter.version for adapter in light.control.lineage] == [0, 1, 2, 3]

    asyncio.run(run())


def test_pin_and_keep_are_set_and_taken_back(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            assert (await light.unix.post("/v1/adapters/2/pin")).json()["pinned"] is True
            assert (await light.unix.post("/v1/adapters/2/pin", json={"pinned": False})).json()["pinned"] is False
            assert (await light.unix.post("/v1/adapters/1/keep", json={"kept": True})).json()["kept"] is True
            assert (await light.unix.post("/v1/adapters/1/keep", json={"kept": False})).json()["kept"] is False
            assert (await light.unix.post("/v1/adapters/1/pin", json={"pinned": "yes"})).status_code == 400
            assert (await light.unix.post("/v1/adapters/99/keep")).json()["error"]["code"] == "adapter_not_found"

    asyncio.run(run())


def test_an_import_needs_an_absolute_folder_and_tells_the_judgement(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            relative = await light.unix.post("/v1/adapters/import", json={"folder": "adapters/x"})
            judged = await light.unix.post("/v1/adapters/import", json={"folder": "/srv/adapters/x"})

        assert (relative.status_code, relative.json()["error"]["param"]) == (400, "folder")
        assert (judged.status_code, judged.json()["state"], judged.json()["reason"]) == (200, "refused", "not finite")

    asyncio.run(run())


def test_two_versions_are_compared(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            assert (await light.unix.get("/v1/adapters/1/diff/2")).json()["cosine"] == 0.5
            assert (await light.unix.get("/v1/adapters/1/diff/77")).status_code == 404

    asyncio.run(run())


def test_an_export_is_a_tar_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "v1-0badcafe"
    folder.mkdir()
    contents = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 3000, "empty": b""}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "link").symlink_to("/etc/hostname")

    async def run() -> None:
        async with serving(tmp_path, adapter_folder=folder) as light:
            answer = await light.unix.get("/v1/adapters/1/export")
            base = await light.unix.get("/v1/adapters/0/export")

        assert answer.headers["content-type"] == "application/x-tar"
        assert len(answer.content) == int(answer.headers["content-length"])
        with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        assert files == {f"v1-0badcafe/{name}": content for name, content in contents.items()}
        assert (base.status_code, base.json()["error"]["code"]) == (409, "no_files")

    asyncio.run(run())


def test_an_export_of_a_version_that_is_collected_meanwhile_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, adapter_folder=tmp_path / "v1-0badcafe") as light:
            answer = await light.unix.get("/v1/adapters/1/export")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_files")

    asyncio.run(run())
