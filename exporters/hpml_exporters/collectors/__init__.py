"""What reads the machine: one module per source, each a `hpml_exporters.collector.Collector`."""
