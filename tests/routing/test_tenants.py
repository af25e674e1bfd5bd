"""Tenants that come, change and go while the server runs: only what a start would accept."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray.config import Config, dump, load, parse
from gammaray.errors import InvalidRequest, NotFound
from gammaray.routing.tenants import (
    Roster,
    change,
    describe,
    expire,
    merged,
    put,
    remove,
    rotate,
    split,
)


def sha(i: int) -> str:
    return f"{i:064x}"


def config(**sections: Any) -> Config:
    tree = {
        "target": {"model": "tiny"},
        "drafters": {"lookup": {"method": "ngram"}, "small": {"method": "model", "model": "x"}},
        "tenants": {"bank": {"api_keys": [{"name": "web", "sha256": sha(1)}], "drafter": "lookup"}},
    }
    return parse(tree | sections, "test")


@pytest.fixture
def roster() -> Roster:
    return Roster(config())


def keys(roster: Roster, name: str = "bank") -> dict[str, str]:
    return {key.name: key.sha256 for key in roster.config.tenants[name].api_keys}


def test_a_new_tenant(roster: Roster) -> None:
    after = put(roster, "shop", {"drafter": "lookup", "limits": {"tokens_per_day": 9}})
    assert after.config.tenants["shop"].limits.tokens_per_day == 9
    assert after.revision == roster.revision + 1
    assert "shop" not in roster.config.tenants
    assert after.config.tenants["bank"] is roster.config.tenants["bank"]
    assert after.notes("shop") and not after.notes("bank") and not after.notes("default")


def test_put_replaces_all_and_change_only_what_it_names(roster: Roster) -> None:
    changed = change(roster, "bank", {"limits": {"max_tokens": 5}, "speculation": {"gamma": 3}})
    changed = change(changed, "bank", {"limits": {"tokens_per_day": 7}, "drafter": None})
    bank = changed.config.tenants["bank"]
    assert (bank.limits.max_tokens, bank.limits.tokens_per_day) == (5, 7)
    assert (bank.speculation.gamma, bank.drafter) == (3, None)
    assert keys(changed) == {"web": sha(1)}
    replaced = put(changed, "bank", {}).config.tenants["bank"]
    assert replaced.limits.max_tokens is None and replaced.api_keys == []


@pytest.mark.parametrize(
    ("tree", "says", "param"),
    [
        ({"drafter": "looku"}, "no drafter is named 'looku'; did you mean 'lookup'?", "tenants.shop.drafter"),
        ({"speculaton": {}}, "unknown key; did you mean 'speculation'?", "tenants.shop.speculaton"),
        ({"speculation": {"gamma": 99}}, "less than or equal to 16", "tenants.shop.speculation.gamma"),
        ({"api_keys": [{"name": "x", "sha256": sha(1)}]}, "the same key as", "tenants.shop.api_keys[0]"),
        ({"pool": {"workers": 2}}, "restart", "pool"),
        ([], "a mapping", None),
    ],
)
def test_what_a_start_would_refuse_is_refused(
    roster: Roster, tree: object, says: str, param: str | None
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        put(roster, "shop", tree)
    assert says in caught.value.message
    assert caught.value.param == param


def test_a_key_that_stands_where_its_hash_belongs_is_not_repeated(roster: Roster) -> None:
    with pytest.raises(InvalidRequest) as caught:
        put(roster, "shop", {"api_keys": [{"name": "x", "sha256": "gr-a-real-key"}]})
    assert "gr-a-real-key" not in caught.value.message


@pytest.mark.parametrize("name", ["", "a/b", "ä", "x" * 65, "a b", "a\n"])
def test_names_that_would_not_fit_into_a_url_or_a_label(roster: Roster, name: str) -> None:
    with pytest.raises(InvalidRequest, match="name"):
        put(roster, name, {})


def test_drafters_of_other_tenants_workers_are_out_of_reach() -> None:
    roster = Roster(config(), apart=frozenset({"small"}))
    with pytest.raises(InvalidRequest, match="restart") as caught:
        change(roster, "bank", {"fallback_drafter": "small"})
    assert caught.value.param == "fallback_drafter"


def test_removal(roster: Roster) -> None:
    after = remove(roster, "bank")
    assert set(after.config.tenants) == {"default"}
    assert remove(after, "bank") is after
    with pytest.raises(NotFound):
        change(after, "bank", {})
    with pytest.raises(InvalidRequest, match="always there"):
        remove(after, "default")


def test_the_last_key_of_a_closed_server_stays() -> None:
    roster = Roster(config(server={"require_api_key": True}))
    with pytest.raises(InvalidRequest, match="no tenant has api_keys"):
        remove(roster, "bank")


def test_rotation_without_grace_ends_the_old_key(roster: Roster) -> None:
    after, name = rotate(roster, "bank", sha(2), now=100.0)
    assert (keys(after), name) == ({"web-2": sha(2)}, "web-2")
    assert keys(rotate(after, "bank", sha(3), now=101.0)[0]) == {"web-3": sha(3)}


def test_rotation_with_grace(roster: Roster) -> None:
    after, _ = rotate(roster, "bank", sha(2), now=100.0, grace_s=60.0)
    assert keys(after) == {"web": sha(1), "web-2": sha(2)}
    assert expire(after, 159.9) is after
    over = expire(after, 160.0)
    assert keys(over) == {"web-2": sha(2)}
    assert over.revision == after.revision + 1
    assert over.expiring == {}
    assert expire(over, 1e9) is over


def test_the_next_rotation_is_of_the_newest_key(roster: Roster) -> None:
    first, _ = rotate(roster, "bank", sha(2), now=100.0, grace_s=60.0)
    second, name = rotate(first, "bank", sha(3), now=110.0, grace_s=60.0)
    assert name == "web-3"
    assert set(keys(second)) == {"web", "web-2", "web-3"}
    assert set(keys(expire(second, 165.0))) == {"web-2", "web-3"}


def test_a_rotation_that_is_asked_again_changes_nothing(roster: Roster) -> None:
    after, name = rotate(roster, "bank", sha(2), now=100.0)
    assert rotate(after, "bank", sha(2), now=101.0) == (after, name)


def test_among_several_keys_one_is_named(roster: Roster) -> None:
    both = change(roster, "bank", {"api_keys": [{"name": n, "sha256": sha(i)} for i, n in enumerate("ab")]})
    with pytest.raises(InvalidRequest, match="say which key is to go: a, b"):
        rotate(both, "bank", sha(9), now=0.0)
    after, name = rotate(both, "bank", sha(9), now=0.0, key="b")
    assert (keys(after), name) == ({"a": sha(0), "b-2": sha(9)}, "b-2")


def test_a_tenant_without_keys_gets_its_first(roster: Roster) -> None:
    after, name = rotate(put(roster, "shop", {}), "shop", sha(5), now=0.0)
    assert (keys(after, "shop"), name) == ({"main": sha(5)}, "main")


def test_a_removed_tenant_leaves_no_key_behind(roster: Roster) -> None:
    after, _ = rotate(roster, "bank", sha(2), now=100.0, grace_s=60.0)
    assert remove(after, "bank").expiring == {}


def test_long_prompts_become_the_first_class(roster: Roster) -> None:
    more = change(roster, "bank", {"classes": [{"name": "code", "when": {"looks_like": "code"}}]})
    classes = split(more, "bank", "long", 900).config.tenants["bank"].classes
    assert [(one.name, one.when.prompt_tokens_over) for one in classes] == [("long", 900), ("code", None)]
    with pytest.raises(InvalidRequest, match="another class"):
        split(split(more, "bank", "long", 900), "bank", "long", 900)


def test_what_is_described_can_be_put(roster: Roster) -> None:
    tree = {
        "drafter": "lookup",
        "fallback_drafter": "small",
        "limits": {"tokens_per_day": 5},
        "classes": [{"name": "long", "when": {"prompt_tokens_over": 5, "header": {"x-kind": "a"}}}],
        "choices": [{"drafter": "small", "concurrency_over": 8}],
        "speculation": {"gamma": 6, "canary": {"drafter": "small"}},
    }
    after = put(roster, "shop", tree)
    shop = after.config.tenants["shop"]
    assert put(after, "shop", describe(shop)).config.tenants["shop"] == shop


def test_the_other_tenants_are_not_checked_again() -> None:
    many = {f"t{i}": {"api_keys": [{"name": "a", "sha256": sha(i)}]} for i in range(300)}
    roster = Roster(config(tenants=many))
    after = put(roster, "shop", {})
    assert all(after.config.tenants[name] is tenant for name, tenant in roster.config.tenants.items())


TREES = st.recursive(
    st.none() | st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
MAPPINGS = st.dictionaries(st.sampled_from("abc"), TREES, max_size=3)


def reference(target: object, patch: object) -> object:
    """RFC 7396, section 2, word by word."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = reference(result.get(name), value)
    return result


@given(MAPPINGS, MAPPINGS)
def test_a_change_is_a_json_merge_patch(target: dict[str, Any], patch: dict[str, Any]) -> None:
    assert merged(target, patch) == reference(target, patch)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "remove", "rotate", "expire", "change"]),
        st.sampled_from(["bank", "shop", "default"]),
        st.integers(0, 4),
    ),
    max_size=12,
)


@given(STEPS)
def test_whatever_is_asked_the_whole_could_be_started(steps: list[tuple[str, str, int]]) -> None:
    roster, fresh = Roster(config()), 10
    for now, (what, name, number) in enumerate(steps):
        fresh += 1
        before = roster
        try:
            if what == "put":
                roster = put(roster, name, {"speculation": {"gamma": number}})
            elif what == "remove":
                roster = remove(roster, name)
            elif what == "rotate":
                roster, _ = rotate(roster, name, sha(fresh), float(now), grace_s=float(number))
            elif what == "expire":
                roster = expire(roster, float(now))
            else:
                roster = change(roster, name, {"limits": {"max_tokens": number}})
        except (InvalidRequest, NotFound):
            assert roster is before
        assert parse(roster.config.model_dump(mode="json"), "again") == roster.config
        assert "default" in roster.config.tenants
        assert roster.revision == before.revision + (roster is not before)
        known = {key.sha256 for tenant in roster.config.tenants.values() for key in tenant.api_keys}
        assert roster.expiring.keys() <= known


def test_a_changed_tree_survives_a_file(roster: Roster, tmp_path: Any) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump(put(roster, "shop", {"drafter": "lookup"}).config))
    assert "shop" in load(file).tenants
