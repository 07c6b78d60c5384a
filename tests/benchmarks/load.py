"""Loading a long session, against bare SQLite.

`session.transcript()` of 10,000 messages, through the store's readers and their thread, against
one `SELECT` of all columns of the same rows on a connection of its own, fetched whole, plus
`json.loads` of the columns that hold JSON, rows and decoded values kept, as a load keeps them. The messages are an agent's: a person asks, the
assistant calls a tool, the tool answers in JSON text, the assistant explains. Both are measured in
turn; the ratio is of the shortest times, with the median of the rounds' own ratios beside it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median

import apsw
import trio
from figures import Figure, print_all, work_folder

from turnkeeper.actors import open_sessions

MESSAGES = 10_000
ROUNDS = 25

SELECT = """
SELECT role, content, extra, id, position, revision, hidden, opener, caller_key, created_at, append_id
FROM messages ORDER BY branch, position
"""


def conversation(exchanges: int) -> list[dict[str, object]]:
    """Return four messages an exchange, one exchange in ten with a picture."""
    messages: list[dict[str, object]] = []
    for number in range(exchanges):
        ask: object = f"Please look up reservation {number:06} and tell me when it leaves. " * 2
        if number % 10 == 0:
            ask = [
                {"type": "text", "text": ask},
                {"type": "image_url", "image_url": {"url": f"https://example.org/{number}.png"}},
            ]
        arguments = json.dumps({"reservation_id": f"{number:06}", "with_passengers": True})
        call = {
            "id": f"call_{number:024}",
            "type": "function",
            "function": {"name": "get_reservation_details", "arguments": arguments},
        }
        flights = [
            {"flight": f"HAT{leg:03}", "date": "2024-05-1" + str(leg), "price": 100 + leg}
            for leg in range(5)
        ]
        messages += [
            {"role": "user", "content": ask},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": "get_reservation_details",
                "content": json.dumps({"reservation_id": f"{number:06}", "flights": flights}),
            },
            {
                "role": "assistant",
                "content": f"Reservation {number:06} leaves in the morning. " * 5,
            },
        ]
    return messages


def bare(connection: apsw.Connection) -> list[tuple[tuple[apsw.SQLiteValue, ...], object, object]]:
    """Read all rows and decode their JSON."""
    found = []
    for row in connection.execute(SELECT).fetchall():
        content, extra = row[1], row[2]
        if isinstance(content, bytes) and content:
            content = json.loads(content)
        if isinstance(extra, (str, bytes)):
            extra = json.loads(extra)
        found.append((row, content, extra))
    return found


async def rounds(path: Path) -> tuple[list[float], list[float]]:
    """Return the seconds of each bare read and of each load."""
    bares, loads = [], []
    async with open_sessions(path) as sessions:
        session = sessions["one"]
        await session.extend(conversation(MESSAGES // 4))
        connection = apsw.Connection(str(path))
        for _ in range(ROUNDS):
            started = time.perf_counter()
            rows = bare(connection)
            bares.append(time.perf_counter() - started)
            started = time.perf_counter()
            transcript = await session.transcript()
            loads.append(time.perf_counter() - started)
            assert len(transcript) == len(rows) == MESSAGES
            del rows, transcript
        connection.close()
    return bares, loads


def measure() -> list[Figure]:
    """Return the ratio and both times."""
    with work_folder() as folder:
        bares, loads = trio.run(rounds, folder / "load.db")
    ratios = [load / bare for load, bare in zip(loads, bares, strict=True)]
    name = f"loading {MESSAGES:,} messages"
    return [
        Figure(f"{name} against a bare SELECT, best", min(loads) / min(bares), "×", at_most=2.0),
        Figure(f"{name} against a bare SELECT, median", median(ratios), "×", at_most=2.0),
        Figure(name, min(loads) * 1e3, "ms"),
        Figure(f"{name} by a bare SELECT", min(bares) * 1e3, "ms"),
    ]


if __name__ == "__main__":
    print_all(measure())
