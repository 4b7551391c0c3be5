"""Job files from sbatch scripts that exist: the words of the script are read, none is run."""

from hpml_orchestrator.convert.files import read_script
from hpml_orchestrator.convert.importer import ImportContext, Imported, import_script
from hpml_orchestrator.convert.report import ImportNote

__all__ = ["ImportContext", "ImportNote", "Imported", "import_script", "read_script"]
