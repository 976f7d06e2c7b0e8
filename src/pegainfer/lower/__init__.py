"""From recorded programs to launches: rewrite, choose, bind; executors and backends of CPU and GPU."""
