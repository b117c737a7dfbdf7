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

// keepalived is the process that uses the files of a folder. It outlives the agent that started it.
type keepalived struct{ dir string }

const (
	processTimeout = 5 * time.Second
	pollInterval   = 10 * time.Millisecond
)

func (k keepalived) file(name string) string { return filepath.Join(k.dir, name) }

func (k keepalived) config() string { return k.file("keepalived.conf") }

// Files with the ids of its processes: the parent, which takes signals, and its child, which does the work.
const (
	parentFile = "keepalived.pid"
	childFile  = "vrrp.pid"
)

// pid returns the process id in a file if that process runs and is a keepalived of this folder, else 0.
func (k keepalived) pid(name string) int {
	content, err := os.ReadFile(k.file(name))
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(content)))
	if err != nil || pid <= 0 {
		return 0
	}
	// A zombie has no command line, and an unrelated process has another one.
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil || !bytes.Contains(line, []byte(k.config())) {
		return 0
	}
	return pid
}

func (k keepalived) runs() bool { return k.pid(parentFile) != 0 && k.pid(childFile) != 0 }

// check returns keepalived's errors about a configuration.
func check(ctx context.Context, path string) error {
	output, err := exec.CommandContext(ctx, "keepalived", "--config-test", "--use-file", path).CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		return errors.New("keepalived is not installed; install the package keepalived, 2.2 or newer")
	}
	if err != nil {
		return fmt.Errorf("keepalived refuses its configuration: %s", strings.ReplaceAll(strings.TrimSpace(string(output)), path, "keepalived.conf"))
	}
	return nil
}

// start starts keepalived and returns when both processes run.
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
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // it must survive the end of the agent
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start keepalived: %w", err)
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait() // keepalived.log has the reason
		close(ended)
	}()
	return waitFor(ctx, func() error {
		select {
		case <-ended:
			output, _ := os.ReadFile(k.file("keepalived.log"))
			return fmt.Errorf("keepalived ended: %s", output)
		default:
		}
		if !k.runs() {
			return errTimeout
		}
		return nil
	})
}

// reload makes keepalived read its configuration again.
func (k keepalived) reload() error {
	if err := syscall.Kill(k.pid(parentFile), syscall.SIGHUP); err != nil {
		return fmt.Errorf("reload keepalived: %w", err)
	}
	return nil
}

// stop stops keepalived, which notifies its peers, so that they take over at once. It is no error if it does not run.
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

var errTimeout = errors.New("timed out")

// waitFor polls done until it returns anything but errTimeout.
func waitFor(ctx context.Context, done func() error) error {
	ctx, cancel := context.WithTimeout(ctx, processTimeout)
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		err := done()
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
