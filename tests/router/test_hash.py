from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.errors import FormatError, ShapeError
from jaxmoe.router import check_table
from jaxmoe.router.hash import lookup

TABLE = np.stack([np.arange(300) % 8, (np.arange(300) + 3) % 8], axis=1).astype(np.int32)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32"])
def test_lookup_takes_any_integers(dtype: str) -> None:
    ids = np.array([5, 0, 127], dtype)
    np.testing.assert_array_equal(jax.jit(lookup, static_argnums=2)(TABLE, ids, 8), TABLE[[5, 0, 127]])


def test_ids_outside_the_table_give_no_expert() -> None:
    ids = jnp.array([299, -1, 300, -(2**31), 2**31 - 1, 0], jnp.int32)
    got = lookup(jnp.asarray(TABLE), ids, 8)
    np.testing.assert_array_equal(got[jnp.array([0, 5])], TABLE[[299, 0]])
    assert (np.asarray(got)[1:5] == -1).all()
    big = lookup(jnp.asarray(TABLE), jnp.array([2**32 - 1, 2**31], jnp.uint32), 8)
    assert (np.asarray(big) == -1).all()


def test_a_bad_table_row_never_reaches_a_kernel() -> None:
    table = jnp.array([[0, 1], [2, 8], [-1, 3]], jnp.int32)
    np.testing.assert_array_equal(lookup(table, jnp.arange(3, dtype=jnp.int32), 8), [[0, 1], [-1, -1], [-1, -1]])


def test_check_table() -> None:
    check_table(TABLE, 8, 2)
    check_table(TABLE.astype(np.int64), 8)
    with pytest.raises(ValueError, match=r"tid2eid\[5, 0\] is 8; .* \[0, 8\)"):
        check_table(np.where(np.arange(300)[:, None] == 5, [[8, 1]], TABLE), 8)
    with pytest.raises(ValueError, match=r"tid2eid\[0, 1\] is -1"):
        check_table(np.array([[0, -1]]), 8)
    check_table(np.array([[0, 4], [4, 4]]), 8)  # twice the same expert: it counts twice
    with pytest.raises(ShapeError, match=r"\(300, 2\).*\[vocabulary, 3\]"):
        check_table(TABLE, 8, 3)
    with pytest.raises(ShapeError, match=r"\(300,\)"):
        check_table(TABLE[:, 0], 8)
    with pytest.raises(FormatError, match="float32"):
        check_table(TABLE.astype(np.float32), 8)
    jax.jit(lambda t: check_table(t, 2))(TABLE)  # values are not known under a trace
