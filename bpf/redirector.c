/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
//go:build ignore

/* One object with all programs and maps, so that user space gets every type once. */
#include "redirector.h"

#include "dns.c"
#include "cgroup.c"
#include "sk_lookup.c"
#include "original_dst.c"
#include "sock_ops.c"
#include "tc.c"

char redirector_license[] SEC("license") = "Dual BSD/GPL";
