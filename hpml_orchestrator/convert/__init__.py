"""Job files from sbatch scripts that exist: the words of the script are read, none is run."""
