"""Faults of what a stranger must not get: values of a job, an order carried out, a pickle opened."""

from __future__ import annotations

from ..mutant import Mutant

SECRET = "tests/unit/test_job_secret.py"
INTERFACES = "tests/distributed/test_interfaces.py"
LOCKS = "tests/unit/test_locks.py"

MUTANTS = (
    Mutant(
        "seal-without-proof",
        "A value that was not sealed with the job's secret is taken.",
        "zerobench/cluster/seal.py",
        "if len(hidden) < NONCE_BYTES or not hmac.compare_digest(tag, self._tag(name, hidden)):",
        "if len(hidden) < NONCE_BYTES:",
        (f"{SECRET}::test_a_seal_opens_for_its_name_and_secret_alone",),
    ),
    Mutant(
        "seal-without-name",
        "A sealed value may be moved to another name.",
        "zerobench/cluster/seal.py",
        'f"{len(name.encode())} {name} ".encode() + hidden',
        "hidden",
        (f"{SECRET}::test_a_value_moved_to_another_name_is_foreign",),
    ),
    Mutant(
        "secret-for-all-users",
        "A job's secret is taken from a file that others can read.",
        "zerobench/cluster/secret.py",
        "_is_own(os.fstat(handle), stat.S_ISREG, 0o077)",
        "_is_own(os.fstat(handle), stat.S_ISREG, 0o007)",
        (f"{SECRET}::test_the_way_by_file",),
    ),
    Mutant(
        "store-on-all-interfaces",
        "The job's store listens on every interface.",
        "zerobench/cluster/interface.py",
        "        listener.bind(place)\n",
        '        listener.bind(("", port))\n',
        (f"{INTERFACES}::test_the_jobs_store_listens_at_its_address_alone",),
    ),
)
