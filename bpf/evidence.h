/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Evidence of life: counters of a source cluster, which both paths maintain. Every function accepts NULL, for a backend
 * without a cluster.
 */
#ifndef ISTHMUS_EVIDENCE_H
#define ISTHMUS_EVIDENCE_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

/* Counts a completed or refused handshake. A refusal is an answer too. */
static __always_inline void count_outcome(struct cluster *cl, bool refused)
{
	if (!cl)
		return;
	__sync_fetch_and_add(refused ? &cl->reset : &cl->established, 1);
	cl->answered_at = bpf_ktime_get_boot_ns();
}

/* Counts a retransmission timeout. */
static __always_inline void count_silence(struct cluster *cl)
{
	if (!cl)
		return;
	__sync_fetch_and_add(&cl->silent, 1);
	cl->silent_at = bpf_ktime_get_boot_ns();
}

#endif
