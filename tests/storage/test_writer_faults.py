from __future__ import annotations

from pathlib import Path

import apsw
import pytest
from support import U, failing_disk, said

from turnkeeper.actors import StorageError, open_sessions
from turnkeeper.storage import inline


async def test_c71_every_write_fails_from_now_on(tmp_path: Path) -> None:
    with failing_disk() as disk:
        async with open_sessions(tmp_path / "state.db", offload=inline, vfs=disk.name) as sessions:
            session = sessions["a"]
            await session.append(U("before"))
            assert sessions.health().ok
            disk.write_error = apsw.IOError
            with pytest.raises(StorageError) as caught:
                await session.append(U("during"))
            assert caught.value.kept
            assert not sessions.health().ok
            assert sessions.health().pending == 1
            assert said(await session.transcript()) == ["before", "during"]
            disk.write_error = None
            await session.append(U("after"))
            assert said(await session.transcript()) == ["before", "during", "after"]
            assert sessions.health().ok
