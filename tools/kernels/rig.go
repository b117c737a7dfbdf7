package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/tools/compile"
	"github.com/isthmus-net/isthmus/tools/kernels/internal/initramfs"
	"github.com/isthmus-net/isthmus/tools/kernels/internal/kernel"
	"github.com/isthmus-net/isthmus/tools/kernels/internal/vm"
	"github.com/isthmus-net/isthmus/tools/lab/cluster"
)

// native names the running kernel.
const native = "native"

// target is a kernel to test. The program that runs on it is compiled for its architecture.
type target struct {
	name   string
	debian kernel.ID // booted in an emulated machine; zero: the running kernel
	extra  bool      // tested on demand only, because the others take a minute
}

// targets lists all kernels, those that are tested by default first.
var targets = []target{
	{name: "6.1", debian: kernel.ID{Series: "6.1", Architecture: "amd64"}},
	{name: "6.12", debian: kernel.ID{Series: "6.12", Architecture: "amd64"}},
	{name: native},
	{name: "6.1-arm64", debian: kernel.ID{Series: "6.1", Architecture: "arm64"}, extra: true},
	{name: "6.12-arm64", debian: kernel.ID{Series: "6.12", Architecture: "arm64"}, extra: true},
}

// names returns the names of targets, and those of extra ones on demand.
func names(extra bool) []string {
	var all []string
	for _, t := range targets {
		if extra || !t.extra {
			all = append(all, t.name)
		}
	}
	return all
}

// modules lists the modules that the checks need and that Debian's kernels do not have built in.
var modules = []string{"veth", "sch_ingress", "cls_bpf", "inet_diag", "udp_diag", "tcp_diag", "sctp"}

// limit is the time that a kernel has from boot to the end of its checks, on a busy machine.
const limit = 15 * time.Minute

// rig runs the checks on kernels.
type rig struct {
	dir       string     // a temporary folder
	results   string     // a folder that remembers on which contents a kernel passed; empty: every kernel is booted
	preparing sync.Mutex // what several kernels share: guests, packages and the cache

	mu  sync.Mutex // guards out
	out io.Writer
}

func newRig(out io.Writer) (*rig, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("testing this machine's kernel needs root: it makes network namespaces and loads BPF programs")
	}
	dir, err := os.MkdirTemp("", "isthmus-kernels-")
	if err != nil {
		return nil, err
	}
	return &rig{dir: dir, out: out}, nil
}

func (r *rig) close() error { return os.RemoveAll(r.dir) }

// outcome is the result of the checks on one kernel.
type outcome struct {
	kernel         string
	passed, failed []string // names; failures with the reason
	end            bool     // the last line was received
	err            error
}

// fault returns the reason of a failure, or nil after a success.
func (o outcome) fault() error {
	switch {
	case o.err != nil:
		return fmt.Errorf("kernel %s: %w", o.kernel, o.err)
	case len(o.failed) > 0:
		return fmt.Errorf("kernel %s: %s", o.kernel, strings.Join(o.failed, "\n"))
	case !o.end:
		return fmt.Errorf("kernel %s: the run was cut short", o.kernel)
	case len(o.passed) == 0:
		return fmt.Errorf("kernel %s: nothing was checked", o.kernel)
	}
	return nil
}

// test runs the checks on one kernel and shows their output as it arrives.
func (r *rig) test(ctx context.Context, name string) (o outcome) {
	o.kernel = name
	i := slices.IndexFunc(targets, func(t target) bool { return t.name == name })
	if i < 0 {
		o.err = fmt.Errorf("not one of %s", strings.Join(names(true), ", "))
		return o
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	begin := time.Now()
	listener := &lines{take: func(line string) { r.take(&o, line) }}
	if name == native {
		o.err = r.runNative(ctx, listener)
	} else {
		o.err = r.bootAgain(&o, func() error { return r.boot(ctx, targets[i], listener) })
	}
	if o.end { // errors after the last line do not matter, such as from powering off
		o.err = nil
	}
	if o.err != nil {
		o.err = fmt.Errorf("%w; the end of its output:\n%s", o.err, strings.Join(listener.last, "\n"))
	}
	r.say("%-10s %d passed, %d failed, %.1fs", o.kernel, len(o.passed), len(o.failed), time.Since(begin).Seconds())
	return o
}

func (r *rig) say(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	fmt.Fprintf(r.out, format+"\n", args...)
}

// Write shows the progress of other packages.
func (r *rig) Write(p []byte) (int, error) {
	r.say("%s", bytes.TrimSpace(p))
	return len(p), nil
}

// duration matches the duration after the name of a check.
var duration = regexp.MustCompile(` \([0-9.µnms]+\)$`)

// take parses one line from the guest.
func (r *rig) take(o *outcome, line string) {
	if name, ok := strings.CutPrefix(line, "PASS "); ok {
		o.passed = append(o.passed, duration.ReplaceAllString(name, ""))
	} else if name, ok := strings.CutPrefix(line, "FAIL "); ok {
		o.failed = append(o.failed, name)
	} else if line == fmt.Sprintf("END %d passed, %d failed", len(o.passed), len(o.failed)) {
		o.end = true
		return
	}
	r.say("%-10s %s", o.kernel, line)
}

// runNative runs the checks on this machine, in separate namespaces.
func (r *rig) runNative(ctx context.Context, out io.Writer) error {
	guest, err := r.guest(ctx, runtime.GOARCH)
	if err != nil {
		return err
	}
	// Pdeathsig fires at the exit of the thread that started the child, so the goroutine keeps its thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, guest)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.WaitDelay = 5 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	return cmd.Run()
}

// bootAgain boots a kernel, and once more if it ended before the first check: under emulation a kernel panics now and then while
// it starts, before it runs anything of ours.
func (r *rig) bootAgain(o *outcome, boot func() error) error {
	err := boot()
	if err == nil && !o.end && len(o.passed)+len(o.failed) == 0 {
		r.say("%-10s ended before the first check; booting it once more", o.kernel)
		err = boot()
	}
	return err
}

// boot runs the checks on a Debian kernel.
func (r *rig) boot(ctx context.Context, t target, console io.Writer) error {
	guest, err := r.guest(ctx, t.debian.Architecture)
	if err != nil {
		return err
	}
	k, err := r.fetch(ctx, t.debian)
	if err != nil {
		return err
	}
	r.say("%-10s boot Linux %s", t.name, k.Release)
	initrd := filepath.Join(r.dir, "initrd-"+t.name)
	if err := writeInitrd(initrd, guest, k); err != nil {
		return err
	}
	return r.unlessPassed(initrd, k, console, func(console io.Writer) error {
		return vm.Machine{Architecture: t.debian.Architecture, Image: k.Image, Initrd: initrd}.Run(ctx, console)
	})
}

// unlessPassed runs a kernel with an initramfs, unless all its checks passed before with the same bytes of both. Then it repeats
// what the kernel said.
func (r *rig) unlessPassed(initrd string, k kernel.Kernel, console io.Writer, run func(console io.Writer) error) error {
	if r.results == "" {
		return run(console)
	}
	content, err := os.ReadFile(initrd)
	if err != nil {
		return err
	}
	image, err := os.ReadFile(k.Image)
	if err != nil {
		return err
	}
	file := filepath.Join(r.results, fmt.Sprintf("%x", sha256.Sum256(append(content, image...))))
	if said, err := os.ReadFile(file); err == nil && passed(said) {
		r.say("%-10s passed before with the same program; it is not booted", k.Release)
		_, err = console.Write(said)
		return err
	}
	var said bytes.Buffer
	if err := run(io.MultiWriter(console, &said)); err != nil || !passed(said.Bytes()) {
		return err
	}
	if err := os.MkdirAll(r.results, 0o700); err != nil {
		return err
	}
	return os.WriteFile(file, said.Bytes(), 0o600)
}

// passed reports whether a kernel that said this passed all checks. A file that was cut short did not.
func passed(said []byte) bool {
	var o outcome
	quiet := &rig{out: io.Discard}
	l := &lines{take: func(line string) { quiet.take(&o, line) }}
	_, err := l.Write(said)
	return err == nil && o.fault() == nil
}

// guest compiles the program that runs on every kernel, for an architecture, and returns its path. It is built without cgo,
// because the initramfs has no C library.
func (r *rig) guest(ctx context.Context, architecture string) (string, error) {
	r.preparing.Lock()
	defer r.preparing.Unlock()
	path := filepath.Join(r.dir, "guest-"+architecture)
	cmd := compile.Go(ctx, "build", "-ldflags=-s -w", "-o", path, "github.com/isthmus-net/isthmus/tools/kernels/guest")
	cmd.Env = append(cmd.Env, "GOARCH="+architecture)
	if output, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the guest for %s: %w\n%s", architecture, err, output)
	}
	return path, nil
}

// fetch downloads a kernel and the emulator, one at a time.
func (r *rig) fetch(ctx context.Context, id kernel.ID) (kernel.Kernel, error) {
	r.preparing.Lock()
	defer r.preparing.Unlock()
	if err := vm.Ensure(ctx, id.Architecture, r); err != nil {
		return kernel.Kernel{}, err
	}
	return kernel.Get(ctx, cluster.CacheDir(), id, modules, r)
}

// writeInitrd writes the initramfs for k: the guest and the modules.
func writeInitrd(path, guest string, k kernel.Kernel) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	files := []initramfs.File{{Path: "init", Source: guest}}
	for _, m := range k.Modules {
		files = append(files, initramfs.File{Path: "modules/" + filepath.Base(m), Source: m})
	}
	return initramfs.Write(f, files)
}

// lines is a writer that passes whole lines to take and keeps the last ones.
type lines struct {
	take func(string)
	rest []byte
	last []string
}

// keep is the number of lines that lines keeps.
const keep = 20

// Write passes whole lines on and keeps an incomplete line for the next call.
func (l *lines) Write(p []byte) (int, error) {
	l.rest = append(l.rest, p...)
	for {
		line, rest, ok := bytes.Cut(l.rest, []byte("\n"))
		if !ok {
			return len(p), nil
		}
		text := string(bytes.TrimRight(line, "\r"))
		l.rest = rest
		l.last = append(l.last, text)
		l.last = l.last[max(0, len(l.last)-keep):]
		l.take(text)
	}
}
