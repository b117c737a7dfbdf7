package bpf

// The generator is pinned in tools/lint, and clang by its version in the command, because another clang emits other
// bytes. -fdebug-prefix-map keeps the path of the checkout out of the objects. Types that several objects share come
// from the first one.
//
//go:generate -command bpf2go go tool -modfile=../tools/lint/go.mod bpf2go -go-package bpf -target bpfel,bpfeb -cc clang-19 -strip llvm-strip-19 -cflags "-O2 -g -Wall -Wextra -Werror -mcpu=v3 -nostdlibinc -Iinclude -fdebug-prefix-map=$PWD=."
//go:generate bpf2go -type drop_reason -type frontend_flags -type backend_flags -type event -type event_kind -type event_path sock sock.bpf.c
//go:generate bpf2go -no-global-types sockops sockops.bpf.c
//go:generate bpf2go -no-global-types close close.bpf.c
//go:generate bpf2go -type names_count names names.bpf.c
//go:generate bpf2go -type packet_flags -type device_flags -type conn_state -type conn_flags -type conn_window packet packet.bpf.c
//go:generate bpf2go -type gateway_frontend_flags -type gateway_vip_flags -type gateway_conn_flags -type gateway_drop_reason -type gateway_opened gateway gateway.bpf.c
