"""Job files from sbatch scripts that exist: the words of the script are read, none is run."""

from hpml_orchestrator.convert.files import read_script
from hpml_orchestrator.convert.importer import Imported, Place, import_script
from hpml_orchestrator.convert.report import Finding

__all__ = ["Finding", "Imported", "Place", "import_script", "read_script"]
