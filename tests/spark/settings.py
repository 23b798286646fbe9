"""Settings of Spark with which a small text costs little, and is cut into parts all the same."""

# Two threads in place of executors; small parts of files and few partitions, so that text is cut
# though there is little of it; and compilers that do not take longer than what they compile runs.
SETTINGS = {
    "spark.master": "local[2]",
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "3",
    "spark.sql.files.maxPartitionBytes": "8000",
    "spark.sql.files.openCostInBytes": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
}
