package apitest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
)

// process is one that was started instead of another one that was killed.
type process struct {
	cmd   *exec.Cmd
	ended chan struct{} // closed when it has
}

// begin starts a process that outlives the test, until stop ends it.
func begin(args []string) (*process, error) {
	p := &process{cmd: exec.Command(args[0], args[1:]...), ended: make(chan struct{})} //nolint:noctx // Run stops it
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = p.cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

// stop kills the process, if there is one.
func (p *process) stop() {
	if p != nil {
		_ = p.cmd.Process.Kill()
		<-p.ended
	}
}

// Restart kills the API server, lets it be away for a while, starts it again with the same arguments, and
// returns when it answers. Its etcd goes on.
func (s *Server) Restart(t testing.TB, away time.Duration) {
	t.Helper()
	config := s.Config(t)
	pid, args, err := findServer(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatalf("kill the API server: %v", err)
	}
	<-time.After(away)
	if err := s.startAgain(config, args); err != nil {
		t.Fatal(err)
	}
}

// Wipe kills the API server and its etcd, and starts both again with nothing in them but the kinds that Isthmus uses: at
// the same address is another cluster, which takes the same administrator for its own.
func (s *Server) Wipe(t testing.TB) {
	t.Helper()
	config := s.Config(t)
	pid, args, err := findServer(config)
	if err != nil {
		t.Fatal(err)
	}
	etcd, etcdArgs, err := find("--listen-client-urls=" + flagOf(args, "--etcd-servers="))
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range []int{pid, etcd} {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatalf("kill the API server and its etcd: %v", err)
		}
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for syscall.Kill(pid, 0) == nil {
			<-tick.C
		}
	}
	if err := os.RemoveAll(filepath.Join(flagOf(etcdArgs, "--data-dir="), "member")); err != nil {
		t.Fatal(err)
	}
	s.etcd.stop()
	if s.etcd, err = begin(etcdArgs); err != nil {
		t.Fatalf("start etcd again: %v", err)
	}
	if err := s.startAgain(config, args); err != nil {
		t.Fatal(err)
	}
	all, err := kinds()
	if err == nil {
		_, err = envtest.InstallCRDs(config, envtest.CRDInstallOptions{CRDs: all})
	}
	if err != nil {
		t.Fatalf("install kinds again: %v", err)
	}
}

// startAgain starts an API server that was killed, and returns when it answers.
func (s *Server) startAgain(config *rest.Config, args []string) error {
	// It ends at once when a connection has its port, as one may that began while it was away.
	err := errEnded
	for giveUp := time.Now().Add(serverTimeout); errors.Is(err, errEnded) && time.Now().Before(giveUp); {
		s.again.stop()
		if s.again, err = begin(args); err != nil {
			return fmt.Errorf("start the API server again: %w", err)
		}
		err = awaitHealth(config, s.again.ended)
	}
	return err
}

// errEnded is of a server that ended before it answered.
var errEnded = errors.New("the API server ended")

// findServer returns the process of the API server behind config, and its arguments.
func findServer(config *rest.Config) (pid int, args []string, err error) {
	u, err := url.Parse(config.Host)
	if err != nil {
		return 0, nil, err
	}
	port := u.Port()
	if port == "" { // host:port without a scheme
		port = strings.TrimSuffix(config.Host[strings.LastIndex(config.Host, ":")+1:], "/")
	}
	return find("--secure-port=" + port)
}

// find returns the process that has an argument, and all of its arguments.
func find(arg string) (pid int, args []string, err error) {
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return 0, nil, err
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil || !bytes.Contains(text, []byte("\x00"+arg+"\x00")) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(f)))
		if err != nil {
			continue
		}
		return pid, strings.Split(strings.TrimSuffix(string(text), "\x00"), "\x00"), nil
	}
	return 0, nil, fmt.Errorf("no process has the argument %s", arg)
}

// flagOf returns the value of a flag among arguments.
func flagOf(args []string, flag string) string {
	for _, arg := range args {
		if value, ok := strings.CutPrefix(arg, flag); ok {
			return value
		}
	}
	return ""
}

// awaitHealth waits until the API server answers, or has ended.
func awaitHealth(config *rest.Config, ended <-chan struct{}) error {
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return err
	}
	host := strings.TrimSuffix(config.Host, "/")
	if !strings.HasPrefix(host, "https://") {
		host = "https://" + host
	}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(serverTimeout)
	for {
		resp, err := client.Get(host + "/readyz") //nolint:noctx // the deadline below bounds the loop
		if err == nil {
			var body []byte
			if body, err = io.ReadAll(resp.Body); err == nil {
				err = fmt.Errorf("%s %s: %s", resp.Request.URL, resp.Status, body)
			}
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-deadline:
			return fmt.Errorf("the API server does not answer %s after its restart: %w", serverTimeout, err)
		case <-ended:
			return errEnded
		case <-tick.C:
		}
	}
}
