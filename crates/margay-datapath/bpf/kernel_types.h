/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * The members of the kernel's structures that are read here. The loader finds where they lie in the running kernel
 * (CO-RE), so their places and what lies between them do not matter.
 */
#pragma once

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct kernfs_node {
	__u64 id;
};

struct cgroup {
	int level;
	struct kernfs_node *kn;
	struct cgroup *ancestors[];
};

struct sock_cgroup_data {
	struct cgroup *cgroup;
};

struct net {
	__u64 net_cookie;
};

typedef struct {
	struct net *net;
} possible_net_t;

struct in6_addr_words {
	__u32 words[4];
};

struct sock_common {
	__u32 skc_rcv_saddr;
	__u16 skc_num;
	unsigned short skc_family;
	volatile unsigned char skc_state;
	unsigned char skc_reuse : 4;
	unsigned char skc_reuseport : 1;
	unsigned char skc_ipv6only : 1;
	unsigned char skc_net_refcnt : 1;
	int skc_bound_dev_if;
	possible_net_t skc_net;
	struct in6_addr skc_v6_rcv_saddr;
};

struct sock {
	struct sock_common __sk_common;
	__u16 sk_protocol;
	struct sock_cgroup_data sk_cgrp_data;
};

struct ipv6_pinfo {
	int ucast_oif;
};

struct inet_sock {
	struct sock sk;
	struct ipv6_pinfo *pinet6;
	int uc_index;
};

struct udp_sock {
	struct inet_sock inet;
};

struct super_block {
	__u32 s_dev;
};

struct inode {
	unsigned long i_ino;
	struct super_block *i_sb;
};

struct file {
	struct inode *f_inode;
};

struct mm_struct {
	struct file *exe_file;
};

struct task_struct {
	struct mm_struct *mm;
	int tgid;
};

struct seq_file;

struct bpf_iter_meta {
	struct seq_file *seq;
};

struct bpf_iter__tcp {
	struct bpf_iter_meta *meta;
	struct sock_common *sk_common;
};

struct bpf_iter__udp {
	struct bpf_iter_meta *meta;
	struct udp_sock *udp_sk;
};

#pragma clang attribute pop
