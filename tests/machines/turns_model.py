"""What a store must be like, in plain lists and dicts: turns, and the inbox that they take from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from machines.model import MOST_ATTEMPTS, Release, Sessions
from machines.nouns import By, Draft, Held, Life, Post, Refused, Row, Took, opener
from turnkeeper.actors import Policy, Rejected

__all__ = ["World"]


@dataclass
class World(Sessions):
    """Sessions with turns and inboxes."""

    max_inbox: int = 3
    tokens: int = 0

    # Turns.

    def take(
        self, id: str, by: By, holder: str, ttl: float, *, force: bool = False, serve: bool = False
    ) -> Took:
        life = self._meant(id, by)
        over = life is not None and life.turn is not None if force else self._admit(id, by, life)
        life = self._write_pending(id, by, life)
        if over and life is not None:
            self._pass_over(id, by, life)
        posts = []
        if serve:
            posts = [] if life is None else self._due(life)
            if not posts:
                return Took(None)
        life = life or self._create(id)
        self.tokens += 1
        self.writes += 1
        held = Held(
            self.tokens,
            by.side,
            holder,
            opener(life.live),
            ttl,
            self.seconds + ttl,
            self.seconds + ttl / 3,
            self.numbers,
        )
        life.turn = held
        rows = tuple(self._deliver(life, posts))
        return Took(held, rows, posts[0].attempts + 1 if posts else 0)

    def end(self, id: str, by: By, release: Release | None) -> tuple[int, int, bool]:
        """Return how many calls were closed, how many posts set aside, and whether some wait."""
        life = self._arrive(id, by, None)
        assert life is not None
        closed, aside = self._end(life, release)
        return closed, aside, release is not None and bool(life.waiting)

    def could_not_end(self, id: str, by: By, release: Release | None) -> None:
        """Storage did not take the end of a turn; it is done with the next change."""
        assert by.token is not None
        self.unreleased.setdefault((by.side, id), {})[by.token] = release

    def tidy(self, id: str, side: int) -> None:
        """A change was made: what was unreleased is released, or somebody else's business."""
        life, ended = self.lives.get(id), self.unreleased.get((side, id), {})
        if life is None or life.turn is None or life.turn.token not in ended:
            self.unreleased.pop((side, id), None)

    def has(self, id: str, life: int, token: int) -> bool:
        """Return whether a turn still holds its session."""
        there = self.lives.get(id)
        return (
            there is not None
            and there.number == life
            and there.turn is not None
            and there.turn.token == token
        )

    def renew(self, id: str) -> None:
        """The holder renews its turn by itself."""
        life = self.lives[id]
        assert life.turn is not None
        ttl = life.turn.ttl
        life.turn = replace(life.turn, expires=self.seconds + ttl, renew_at=self.seconds + ttl / 3)

    def interrupted(self, id: str) -> bool:
        """Return whether a message waits that interrupts the turn that is held."""
        life = self.lives[id]
        assert life.turn is not None
        return any(
            post.policy == "interrupt" and post.place > life.turn.seen for post in life.waiting
        )

    def _due(self, life: Life) -> list[Post]:
        """Return what the next turn takes; on the way, what is spent or taken back is dealt with."""
        while life.waiting:
            waiting = life.waiting
            number = 1
            if waiting[0].policy == "collect":
                while number < len(waiting) and waiting[number].policy == "collect":
                    number += 1
            for index, post in enumerate(waiting, 1):
                if post.policy == "interrupt":
                    number = max(number, index)
            posts = waiting[:number]
            gone = [post for post in posts if post.row is not None and post.row not in life.live]
            spent = [post for post in posts if post not in gone and post.attempts >= MOST_ATTEMPTS]
            if not gone and not spent:
                return posts
            self.writes += 1
            life.inbox = [
                replace(post, token=None, aside=True) if post in spent else post
                for post in life.inbox
                if post not in gone
            ]
        return []

    def _deliver(self, life: Life, posts: list[Post]) -> list[Row]:
        assert not posts or life.turn is not None
        fresh = [post for post in posts if post.row is None]
        if fresh:
            life.redo = []
            opening = next((post for post in posts if post.draft.opens), None)
            drafts = [
                post.draft if post is opening else replace(post.draft, opens=False)
                for post in fresh
            ]
            written = self._append(life, drafts, [post.number for post in fresh])
        rows = []
        for post in posts:
            row = post.row or written[fresh.index(post)]
            assert life.turn is not None
            taken = replace(post, attempts=post.attempts + 1, token=life.turn.token, row=row)
            life.inbox[life.inbox.index(post)] = taken
            rows.append(row)
        return rows

    # The inbox.

    def post(
        self, id: str, by: By, draft: Draft, policy: Policy | None
    ) -> tuple[str, Post | Row | None, Policy, int]:
        """Return the status, what it is about, the policy that was applied, and how many wait."""
        life = self._passing(id, by, None)
        policy = policy or (life.policy if life is not None else None) or "queue"
        waiting = min(self.max_inbox, len(life.waiting)) if life is not None else 0
        if life is not None and draft.key is not None:
            row, first = life.keys.get(draft.key), life.posted(draft.key)
            there = row.draft if row is not None else None if first is None else first.draft
            if there is not None:
                if not there.same(draft):
                    raise Refused(Rejected, "the key came with other content")
                return "duplicate", row or first, policy, waiting
        if waiting == self.max_inbox:
            return "full", None, policy, waiting
        held = None if life is None else life.turn
        busy = waiting > 0 or (held is not None and self.is_held(held, by, id))
        if policy == "refuse" and busy:
            return "refused", None, policy, waiting
        life = life or self._create(id)
        self.numbers += 1
        self.writes += 1
        posted = Post(self.numbers, draft, policy, self.numbers)
        life.inbox.append(posted)
        return "accepted", posted, policy, waiting + 1

    def requeue(self, id: str, by: By, number: int) -> bool:
        life = self._passing(id, by, None)
        post = self._set_aside(life, number)
        if life is None or post is None:
            return False
        self.writes += 1
        self.numbers += 1
        life.inbox.remove(post)
        life.inbox.append(replace(post, place=self.numbers, attempts=0, token=None, aside=False))
        return True

    def dismiss(self, id: str, by: By, number: int) -> bool:
        life = self._passing(id, by, None)
        post = self._set_aside(life, number)
        if life is None or post is None:
            return False
        self.writes += 1
        life.inbox.remove(post)
        return True

    def set_policy(self, id: str, by: By, policy: Policy | None) -> None:
        life = self._passing(id, by, None) or self._create(id)
        life.policy = policy
        self.writes += 1

    def _set_aside(self, life: Life | None, number: int) -> Post | None:
        posts = [] if life is None else life.inbox
        return next((post for post in posts if post.number == number and post.aside), None)
