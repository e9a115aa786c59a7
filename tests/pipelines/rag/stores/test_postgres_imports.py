"""Who keeps collections in SQLite does not need psycopg."""

import subprocess
import sys


def test_psycopg_is_imported_for_postgres_only() -> None:
    code = "import sys, pipelines.rag.library, pipelines.rag.stores.sqlite.store; assert 'psycopg' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
