package vrrp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// keepalived is the process that runs with the files of a folder, whoever started it: it outlives us.
type keepalived struct{ dir string }

const (
	processTimeout = 5 * time.Second
	pollInterval   = 10 * time.Millisecond
)

func (k keepalived) file(name string) string { return filepath.Join(k.dir, name) }

func (k keepalived) config() string { return k.file("keepalived.conf") }

// The files of its processes' ids: the one that we signal, and its child, which does the work.
const (
	parentFile = "keepalived.pid"
	childFile  = "vrrp.pid"
)

// pid returns the id in a file when that process lives and is a keepalived of this folder, else 0.
func (k keepalived) pid(name string) int {
	content, err := os.ReadFile(k.file(name))
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(content)))
	if err != nil || pid <= 0 {
		return 0
	}
	// A dead process that nobody waited for has no command line, and another one has another.
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil || !bytes.Contains(line, []byte(k.config())) {
		return 0
	}
	return pid
}

func (k keepalived) runs() bool { return k.pid(parentFile) != 0 && k.pid(childFile) != 0 }

// check returns what keepalived says against a configuration.
func check(ctx context.Context, path string) error {
	said, err := exec.CommandContext(ctx, "keepalived", "--config-test", "--use-file", path).CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		return errors.New("keepalived is not installed; install the package keepalived, 2.2 or newer")
	}
	if err != nil {
		return fmt.Errorf("keepalived refuses its configuration: %s", strings.ReplaceAll(strings.TrimSpace(string(said)), path, "keepalived.conf"))
	}
	return nil
}

// start starts it and returns when both processes live.
func (k keepalived) start(ctx context.Context) error {
	for _, name := range []string{parentFile, childFile} {
		if err := os.Remove(k.file(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	log, err := os.Create(k.file("keepalived.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.CommandContext(context.WithoutCancel(ctx), "keepalived", "--dont-fork", "--vrrp", "--log-console", "--no-syslog",
		"--use-file", k.config(), "--pid", k.file(parentFile), "--vrrp_pid", k.file(childFile))
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // what ends us does not end it
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start keepalived: %w", err)
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait() // its log says why
		close(ended)
	}()
	return waitFor(ctx, func() error {
		select {
		case <-ended:
			said, _ := os.ReadFile(k.file("keepalived.log"))
			return fmt.Errorf("keepalived ended: %s", said)
		default:
		}
		if !k.runs() {
			return errTimeout
		}
		return nil
	})
}

// reload makes it read its configuration again.
func (k keepalived) reload() error {
	if err := syscall.Kill(k.pid(parentFile), syscall.SIGHUP); err != nil {
		return fmt.Errorf("reload keepalived: %w", err)
	}
	return nil
}

// stop ends it; its peers are told, and take over at once. A keepalived that does not run is no error.
func (k keepalived) stop(ctx context.Context) error {
	signal := syscall.SIGTERM
	begin := time.Now()
	return waitFor(ctx, func() error {
		gone := true
		for _, name := range []string{parentFile, childFile} {
			if pid := k.pid(name); pid != 0 {
				gone = false
				if err := syscall.Kill(pid, signal); err != nil && !errors.Is(err, syscall.ESRCH) {
					return fmt.Errorf("stop keepalived: %w", err)
				}
			}
		}
		if gone {
			return nil
		}
		if time.Since(begin) > processTimeout/2 {
			signal = syscall.SIGKILL
		}
		return errTimeout
	})
}

var errTimeout = errors.New("not in time")

// await polls until what returns something else than errNotYet.
func waitFor(ctx context.Context, what func() error) error {
	ctx, cancel := context.WithTimeout(ctx, processTimeout)
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		err := what()
		if !errors.Is(err, errTimeout) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("keepalived: %w", err)
		case <-tick.C:
		}
	}
}
