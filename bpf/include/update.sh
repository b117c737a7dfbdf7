#!/bin/sh
# Brings the kernel and libbpf headers that the BPF programs are compiled against into this folder.
# They come from the Debian 12 packages linux-libc-dev (Linux 6.1, our oldest kernel, so nothing newer
# can slip into a program) and libbpf-dev. Run it only to move to a newer floor, then regenerate.
set -eu
cd "$(dirname "$0")"
cp /usr/include/linux/bpf.h /usr/include/linux/bpf_common.h linux/
cp /usr/include/bpf/bpf_helpers.h /usr/include/bpf/bpf_helper_defs.h /usr/include/bpf/bpf_endian.h bpf/
{
	echo "Written by update.sh: the packages these headers were copied from."
	dpkg-query -W -f '${Package} ${Version}\n' linux-libc-dev libbpf-dev
} >ORIGIN
