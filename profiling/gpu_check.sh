#!/usr/bin/env bash
# Everything that has to run on a GPU, in stages, each with its own time limit and log. Run it in the repository's root, where
# PYTHON can import the project and its dependencies (a GPU host without a package index: unpack them and set PYTHONPATH).
#
#   bash profiling/gpu_check.sh [STAGE...]        default: tests bench demo
#
#   tests      pytest, everything marked gpu
#   bench      profiling.bench with peers, against what is asked of the kernels
#   sanitize   compute-sanitizer over the tests marked sanitizer: memcheck, racecheck, initcheck (not over those marked
#              concurrent; or one of these by its name)
#   demo       profiling.demo
#   step       profiling.decode_step: a whole decode step, against separate launches; some 70 GB of GPU memory
#   collective profiling.collective: the fused finalize and all-reduce of one rank, over loopback
#   ranks      profiling.bench under torchrun: what RANKS (4) ranks do together, a GPU each
#   ncu        profiling.ncu.run_all: Nsight Compute, one warm launch of every operator
#
# The summary comes last, on the terminal and as summary.md and summary.json. Exit code: 0 if every stage passed.
#
# RESULTS_DIR=DIR            logs and results (profiling/results/raw)
# PYTHON=EXE                 the interpreter (.venv/bin/python if it exists, else python3)
# TEST_ARGS, BENCH_ARGS, DEMO_ARGS, STEP_ARGS, COLLECTIVE_ARGS, RANKS_ARGS, NCU_ARGS, SANITIZER_ARGS   added to a stage's
#                            arguments (TEST_ARGS: also to sanitize's)
# LIMIT_TESTS, LIMIT_BENCH, LIMIT_SANITIZE, LIMIT_DEMO, LIMIT_STEP, LIMIT_COLLECTIVE, LIMIT_RANKS, LIMIT_NCU   seconds a stage
#                            (a tool of sanitize) may take
# COMPUTE_SANITIZER=EXE, NCU=EXE    the tools (what PATH or their usual folders hold)
# FLASHNEXT_CACHE_DIR=DIR    compiled kernels (build/kernel-cache), so that only the first stage compiles
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
RESULTS_DIR=${RESULTS_DIR:-profiling/results/raw}
export FLASHNEXT_CACHE_DIR=${FLASHNEXT_CACHE_DIR:-$PWD/build/kernel-cache}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$RESULTS_DIR" "$FLASHNEXT_CACHE_DIR"
failed=0

# note NAME EXIT-CODE SECONDS LIMIT: the outcome of a stage, in stages.tsv; a later run of a stage replaces its line
note() {
  touch "$RESULTS_DIR/stages.tsv"
  grep -v "^$1	" "$RESULTS_DIR/stages.tsv" >"$RESULTS_DIR/stages.part"
  printf '%s\t%d\t%d\t%d\n' "$@" >>"$RESULTS_DIR/stages.part"
  mv "$RESULTS_DIR/stages.part" "$RESULTS_DIR/stages.tsv"
}

# stage NAME SECONDS COMMAND...: logs to NAME.log and notes the outcome
stage() {
  local name=$1 limit=$2 start rc seconds outcome
  shift 2
  echo "== $name: $*"
  start=$(date +%s)
  timeout --signal=INT --kill-after=15 "$limit" "$@" </dev/null 2>&1 | tee "$RESULTS_DIR/$name.log"
  rc=${PIPESTATUS[0]}
  seconds=$(($(date +%s) - start))
  note "$name" "$rc" "$seconds" "$limit"
  if [ $rc -ne 0 ]; then
    failed=1
    echo "== $name: FAILED (exit code $rc$([ $rc -eq 124 ] && echo ", out of time")) after $seconds s"
  elif ! outcome=$("$PYTHON" -m profiling.summarise "$RESULTS_DIR" --stage "$name"); then
    failed=1 # exit code 0 is not all: skipped tests show nothing
    echo "== $name: FAILED ($outcome) after $seconds s"
  else
    echo "== $name: ok, $seconds s"
  fi
}

tests() {
  # shellcheck disable=SC2086  # word splitting is meant, here and below
  stage tests "${LIMIT_TESTS:-420}" "$PYTHON" -m pytest -m gpu -q -p no:cacheprovider --durations=10 ${TEST_ARGS:-}
}

bench() {
  stage bench "${LIMIT_BENCH:-420}" "$PYTHON" -m profiling.bench --peers --json "$RESULTS_DIR/bench.json" ${BENCH_ARGS:-}
}

demo() {
  stage demo "${LIMIT_DEMO:-180}" "$PYTHON" -m profiling.demo --json "$RESULTS_DIR/demo.json" ${DEMO_ARGS:-}
}

# tool NAME CANDIDATE...: the first candidate that can be run, on standard output
tool() {
  local name=$1 candidate
  shift
  for candidate in "$@"; do
    [ -n "$candidate" ] && [ -x "$candidate" ] && echo "$candidate" && return 0
  done
  echo "== $name is not on this host" >&2
  return 1
}

sanitize() {
  local tool=$1 marks="gpu and sanitizer" sanitizer
  sanitizer=$(tool compute-sanitizer ${COMPUTE_SANITIZER-"$(type -P compute-sanitizer)" /usr/local/cuda*/bin/compute-sanitizer}) ||
    { failed=1; note "$tool" 127 0 0; return; }
  # it runs one kernel at a time: ranks of a virtual world would wait for each other until they give up
  [ "$tool" = initcheck ] && marks="$marks and not concurrent"
  # API errors that a library provokes and handles are not ours; one process: kernels of child processes are the same ones
  stage "$tool" "${LIMIT_SANITIZE:-420}" "$sanitizer" --tool "$tool" --report-api-errors no --error-exitcode 86 \
    --target-processes application-only --print-limit 20 ${SANITIZER_ARGS:-} \
    "$PYTHON" -m pytest -m "$marks" -q -p no:cacheprovider -o timeout=0 ${TEST_ARGS:-}
}

step() {
  stage step "${LIMIT_STEP:-300}" "$PYTHON" -m profiling.decode_step --json "$RESULTS_DIR/decode_step.json" ${STEP_ARGS:-}
}

collective() {
  stage collective "${LIMIT_COLLECTIVE:-120}" "$PYTHON" -m profiling.collective --json "$RESULTS_DIR/collective.json" \
    ${COLLECTIVE_ARGS:-}
}

ranks() {
  stage ranks "${LIMIT_RANKS:-300}" "$PYTHON" -m torch.distributed.run --nproc-per-node "${RANKS:-4}" -m profiling.bench \
    --ops all_reduce,moe_finalize_all_reduce --peers --json "$RESULTS_DIR/ranks.json" ${RANKS_ARGS:-}
}

ncu() {
  stage ncu "${LIMIT_NCU:-180}" "$PYTHON" -m profiling.ncu.run_all --out "$RESULTS_DIR/ncu" ${NCU_ARGS:-}
}

[ $# -gt 0 ] || set -- tests bench demo
for name in "$@"; do
  case $name in
    tests | bench | demo | step | collective | ranks | ncu | sanitize | memcheck | racecheck | initcheck | synccheck) ;;
    *) echo "$name: no such stage; tests, bench, demo, step, collective, ranks, ncu, sanitize, memcheck, racecheck, initcheck, synccheck" >&2; exit 2 ;;
  esac
done
for name in "$@"; do
  case $name in
    sanitize) for tool in memcheck racecheck initcheck; do sanitize $tool; done ;;
    *check) sanitize "$name" ;;
    *) "$name" ;;
  esac
done
echo
"$PYTHON" -m profiling.summarise "$RESULTS_DIR" --markdown "$RESULTS_DIR/summary.md" --json "$RESULTS_DIR/summary.json" || failed=1
exit $failed
