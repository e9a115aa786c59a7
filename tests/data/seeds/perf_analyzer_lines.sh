# Published command lines of perf_analyzer, as printed.
perf_analyzer -m bert-classifier \
--triton-http-endpoint localhost:8000 \
--concurrency 100 \
--measurement-interval 10000 \
--duration-ms 60000 \
--collect-metrics \
-f results.csv

perf_analyzer -m classification-pipeline -c 100 -d 60 -f results.csv
