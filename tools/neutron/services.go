package neutron

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Service is one of the services of a cloud.
type Service string

// The services of a cloud.
const (
	Keystone Service = "keystone"
	Neutron  Service = "neutron"
	Nova     Service = "nova" // with Placement
	Octavia  Service = "octavia"
)

// environment makes Debian's Python ignore packages of other Pythons, and sends no request to a proxy.
var environment = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", "no_proxy=*", "HOME=/root"}

// command returns a command in the cloud's network namespace.
func (c *Cloud) command(ctx context.Context, argv ...string) *exec.Cmd {
	if c.cfg.Namespace != "" {
		argv = append([]string{"nsenter", "--net=" + c.cfg.Namespace}, argv...)
	}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env, cmd.Dir = slices.Concat(environment, c.engineEnvironment()), c.cfg.Dir
	return cmd
}

// run runs a command and waits for it. The error contains the end of its output.
func (c *Cloud) run(ctx context.Context, argv ...string) error {
	said, err := c.command(ctx, argv...).CombinedOutput()
	if err != nil {
		lines := bytes.Split(bytes.TrimSpace(said), []byte("\n"))
		return fmt.Errorf("%s: %w\n%s", argv[0], err, bytes.Join(lines[max(0, len(lines)-15):], []byte("\n")))
	}
	return nil
}

// writeAhead switches a new database to SQLite's write-ahead log. With the default journal, readers block the writer and its
// requests fail.
func (c *Cloud) writeAhead(ctx context.Context, database string) error {
	return c.run(ctx, "/usr/bin/python3", "-c", "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('PRAGMA journal_mode=WAL')", database)
}

// makeKeystone creates Keystone's tables, keys and administrator.
func (c *Cloud) makeKeystone(ctx context.Context) error {
	return c.once("keystone.made", func() error {
		if err := c.writeAhead(ctx, c.path("keystone.db")); err != nil {
			return err
		}
		for _, args := range [][]string{
			{"db_sync"},
			{"fernet_setup", "--keystone-user", "root", "--keystone-group", "root"},
			{"credential_setup", "--keystone-user", "root", "--keystone-group", "root"},
			{
				"bootstrap", "--bootstrap-password", password, "--bootstrap-region-id", region, "--bootstrap-public-url", c.keystoneURL(),
				"--bootstrap-internal-url", c.keystoneURL(), "--bootstrap-admin-url", c.keystoneURL(),
			},
		} {
			if err := c.run(ctx, append([]string{"keystone-manage", "--config-file", c.path("keystone.conf")}, args...)...); err != nil {
				return err
			}
		}
		return nil
	})
}

// Host is the name of the host of servers: Nova's compute host, and that of the engine.
const Host = "compute"

//go:embed schema.py
var schema string

// makeNeutron creates Neutron's tables.
func (c *Cloud) makeNeutron(ctx context.Context) error {
	return c.once("neutron.made", func() error {
		if err := os.RemoveAll(c.path("neutron.db")); err != nil { // of an interrupted attempt
			return err
		}
		if err := c.writeAhead(ctx, c.path("neutron.db")); err != nil {
			return err
		}
		return c.run(ctx, "/usr/bin/python3", "-c", schema, c.database("neutron"), Host)
	})
}

// arguments returns the command line of a service, and the URL at which it answers. The added header makes uWSGI announce that it
// closes a connection; otherwise later requests on the connection fail. With an interpreter of its own for the application, a thread waits for ever once in a
// while: extension modules such as cryptography's take the lock of the main one.
func (c *Cloud) arguments(s Service) (argv []string, url string) {
	if s == Keystone {
		return []string{
			"uwsgi", "--plugin", "python3", "--http-socket", fmt.Sprintf("%s:%d", c.cfg.Addr, keystonePort),
			"--wsgi-file", "/usr/bin/keystone-wsgi-public", "--master", "--processes", "1", "--threads", "4", "--enable-threads",
			"--lazy-apps", "--single-interpreter", "--post-buffering", "65536", "--add-header", "Connection: close", "--die-on-term", "--no-orphans", "--buffer-size", "65535",
		}, c.keystoneURL()
	}
	if s == Nova {
		return []string{"/usr/bin/python3", "-c", compute, c.cfg.Dir, c.cfg.Addr.String(), strconv.Itoa(novaPort), strconv.Itoa(innerPort)}, c.novaURL()
	}
	if s == Octavia {
		return []string{"/usr/bin/python3", "-c", balancing, c.cfg.Dir}, c.octaviaURL()
	}
	argv = []string{"neutron-server"}
	if c.cfg.Engine {
		argv = []string{"/usr/bin/python3", "-c", serving}
	}
	return append(argv, "--config-file", c.path("neutron.conf"), "--config-file", c.path("ml2.ini")), c.neutronURL()
}

// Start starts a service unless it runs, and waits until it answers.
func (c *Cloud) Start(ctx context.Context, s Service) error {
	if _, running := c.pid(s); running {
		return nil
	}
	if s == Keystone { // see WithTokens
		if err := os.WriteFile(c.path("keystone.conf"), []byte(c.keystoneConf()), 0o600); err != nil {
			return err
		}
	}
	argv, answers := c.starting(s)
	log, err := os.OpenFile(c.path(string(s)+".out"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := c.command(context.WithoutCancel(ctx), argv...)
	cmd.Env = append(cmd.Env, "OS_KEYSTONE_CONFIG_FILES="+c.path("keystone.conf"))
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // it outlives the caller, and Kill finds its children by their session
	if err := cmd.Start(); err != nil {
		return err
	}
	if err := os.WriteFile(c.pidFile(s), []byte(processName(cmd.Process.Pid)), 0o600); err != nil {
		return errors.Join(err, cmd.Process.Kill())
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	if err := c.await(ctx, answers, ended); err != nil {
		return err
	}
	if s == Neutron {
		return c.warm(ctx)
	}
	return nil
}

// starting returns the command line of a service, and a function that reports whether it answers.
func (c *Cloud) starting(s Service) (argv []string, answers func(context.Context) error) {
	if slices.Contains(engine, s) {
		argv, question := c.engineArguments(s)
		return argv, func(ctx context.Context) error { return c.run(ctx, question...) }
	}
	argv, url := c.arguments(s)
	return argv, func(ctx context.Context) error { return c.answers(ctx, url) }
}

// await waits until a service answers.
func (c *Cloud) await(ctx context.Context, answers func(context.Context) error, ended <-chan error) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	for {
		last := answers(ctx)
		if last == nil {
			return nil
		}
		select {
		case err := <-ended:
			return fmt.Errorf("it ended (%w): see the logs in %s", errors.Join(err), c.cfg.Dir)
		case <-ctx.Done():
			return fmt.Errorf("no answer: %w: see the logs in %s", last, c.cfg.Dir)
		case <-again.C:
		}
	}
}

// answers reports whether a service answers a request.
func (c *Cloud) answers(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	client := http.Client{Transport: c.transport()}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	return response.Body.Close()
}

// Stop terminates a service, and kills it after 10 s. It succeeds if the service does not run.
func (c *Cloud) Stop(ctx context.Context, s Service) error { return c.end(ctx, s, syscall.SIGTERM) }

// Kill kills a service, as a crash would.
func (c *Cloud) Kill(ctx context.Context, s Service) error { return c.end(ctx, s, syscall.SIGKILL) }

func (c *Cloud) end(ctx context.Context, s Service, signal syscall.Signal) error {
	pid, running := c.pid(s)
	if !running {
		return nil
	}
	// The parent first, because it would restart its children. Then the whole group, for the remaining children.
	if err := syscall.Kill(pid, signal); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	for running {
		select {
		case <-ctx.Done():
			running = false
		case <-again.C:
			_, running = c.pid(s)
		}
	}
	if err := syscall.Kill(-pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	return os.RemoveAll(c.pidFile(s))
}

func (c *Cloud) pidFile(s Service) string { return c.path(string(s) + ".process") }

// pid returns the process of a service, if it runs.
func (c *Cloud) pid(s Service) (pid int, running bool) {
	b, err := os.ReadFile(c.pidFile(s))
	if err != nil {
		return 0, false
	}
	id, _, _ := strings.Cut(string(b), " ")
	pid, err = strconv.Atoi(id)
	return pid, err == nil && processName(pid) == string(b)
}

// processName distinguishes a process from a later one with the same PID, by its start time (proc(5), field 22 of stat). It is
// empty if the process does not run.
func processName(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(fields) < 20 || fields[0] == "Z" {
		return ""
	}
	return fmt.Sprintf("%d %s", pid, fields[19])
}
