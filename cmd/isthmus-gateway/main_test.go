package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/cmd/internal/httpserver"
	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/nft"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

func TestMain(m *testing.M) { os.Exit(netlab.Main(m)) }

// config returns the configuration of a gateway on loopback, and its controller's client.
func config(t *testing.T) (cfg Config, client *http.Client) {
	t.Helper()
	ca, err := certs.NewAuthority("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	files := func(identity string) certs.Files {
		t.Helper()
		p, err := ca.Issue(identity, time.Now(), time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		f := certs.Files{Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key"), CA: filepath.Join(dir, "ca.crt")}
		if err := errors.Join(os.WriteFile(f.Cert, p.Cert, 0o600), os.WriteFile(f.Key, p.Key, 0o600), os.WriteFile(f.CA, ca.Cert, 0o600)); err != nil {
			t.Fatal(err)
		}
		return f
	}
	cfg = *defaults()
	cfg.Cluster, cfg.Files = "a", files("gw-1")
	cfg.StateDir, cfg.RunDir = t.TempDir(), t.TempDir()
	cfg.Listen, cfg.HTTPListen = free(t), free(t)
	source, err := certs.Open(files(certs.Controller), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{TLSClientConfig: source.Client("gw-1")}
	t.Cleanup(transport.CloseIdleConnections)
	return cfg, &http.Client{Transport: transport}
}

// free returns an unused address.
func free(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// start runs a gateway. The channel receives its result.
func start(t *testing.T, cfg Config) <-chan error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- run(t.Context(), cfg, slog.New(slog.DiscardHandler)) }()
	return done
}

// await requests a path until it gets a status.
func await(t *testing.T, url string, code int) string {
	t.Helper()
	return awaitBy(t, httpserver.LocalClient(), url, code)
}

// awaitBy is await with a given client.
func awaitBy(t *testing.T, by *http.Client, url string, code int) string {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; <-time.After(10 * time.Millisecond) {
		resp, err := by.Get(url)
		if err == nil {
			b, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode == code {
				return string(b)
			}
			err = fmt.Errorf("%d %s", resp.StatusCode, b)
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// A gateway obeys its controller, applies its saved state after a restart, and ends as the signal says.
func TestGateway(t *testing.T) {
	netlab.Privileged(t)
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nft.Remove() })
	cfg, client := config(t)
	done := start(t, cfg)
	await(t, "https://"+cfg.HTTPListen+"/healthz", 200)
	if have := await(t, "https://"+cfg.HTTPListen+"/readyz", 503); !strings.Contains(have, "no state") {
		t.Errorf("not ready: %s", have)
	}
	state := desired.State{Cluster: "a", Group: "edge", Balancer: desired.NFTables, Peers: []desired.PeerGateway{{URL: "https://127.0.0.1:9", Name: "gw-2"}}, VIPs: []desired.VIP{{
		Addr: netip.MustParseAddr("198.51.100.7"), Announce: desired.ByNone, Return: desired.Masquerade,
		Frontends: []desired.Frontend{{Service: "shop/web", Protocol: "TCP", Port: 80, Backends: []desired.Backend{{Addr: netip.MustParseAddr("10.1.0.5"), Port: 8080, Weight: 1}}}},
	}}}
	body, err := json.Marshal(desired.NewRequest(3, state))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Post("https://"+cfg.Listen+"/v1/reconfigure", "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	answer, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if resp.StatusCode != 200 {
		t.Fatalf("%d %s", resp.StatusCode, answer)
	}

	// A restart notifies no neighbour. The next process is ready without a controller.
	end(t, done, syscall.SIGHUP)
	if _, err := os.Stat(filepath.Join(cfg.RunDir, "serving")); err != nil {
		t.Errorf("a successor does not know of its predecessor: %v", err)
	}
	done = start(t, cfg)
	await(t, "https://"+cfg.HTTPListen+"/readyz", 200)
	if have := await(t, "https://"+cfg.HTTPListen+"/metrics", 200); !strings.Contains(have, "isthmus_gateway_generation 3") || !strings.Contains(have, `isthmus_gateway_drifts_total{component="bgp"} 0`) {
		t.Errorf("metrics:\n%s", have)
	}
	// The peer is not reachable.
	within(t, "it is to be seen that the other gateway is away", func(late <-chan time.Time) bool {
		for !strings.Contains(await(t, "https://"+cfg.HTTPListen+"/metrics", 200), `isthmus_gateway_peer_reachable{gateway="gw-2",url="https://127.0.0.1:9"} 0`) {
			select {
			case <-late:
				return false
			case <-time.After(10 * time.Millisecond):
			}
		}
		return true
	})
	if have := command(t, "show", "peers", "--http-listen="+cfg.HTTPListen); !strings.Contains(have, "gw-2     https://127.0.0.1:9  0     0         0       0        ") || !strings.Contains(have, "connection refused") {
		t.Errorf("show peers:\n%s", have)
	}
	end(t, done, syscall.SIGTERM)
	if _, err := os.Stat(filepath.Join(cfg.RunDir, "serving")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a gateway that was taken out of service is taken for one that serves: %v", err)
	}
	if have := command(t, "show", "--state-dir="+cfg.StateDir); !strings.Contains(have, "198.51.100.7  80/TCP  shop/web  none      masquerade  1         0         broken") {
		t.Errorf("show:\n%s", have)
	}
	if have := command(t, "show", "-o", "json", "--state-dir="+cfg.StateDir); !strings.Contains(have, `"failover": "broken"`) {
		t.Errorf("show:\n%s", have)
	}
	command(t, "cleanup")
}

func end(t *testing.T, done <-chan error, s syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(os.Getpid(), s); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("%v: %v", s, err)
	}
}

func command(t *testing.T, args ...string) string {
	t.Helper()
	var out bytes.Buffer
	cmd := newCommand()
	cmd.SetOut(&out)
	cmd.SetArgs(args)
	if err := cmd.ExecuteContext(context.Background()); err != nil {
		t.Errorf("%v: %v", args, err)
	}
	return out.String()
}

// Every fault is reported with its flag.
func TestValidate(t *testing.T) {
	cfg := defaults()
	cfg.Controller, cfg.Listen, cfg.StateDir, cfg.CheckEvery, cfg.LogFormat, cfg.Balancer, cfg.XDP, cfg.Flows = "", "9479", "state", 0, "xml", "ipvs", "generic", -1
	err := cfg.Validate()
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"--cluster", "--controller-identity", "--listen=9479", "--state-dir=state", "--check-interval", "--log-format=xml", "--balancer=ipvs", "--xdp=generic", "--flows=-1"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no word about %s in: %v", want, err)
		}
	}
	cfg = defaults()
	cfg.Cluster = "a"
	if err := cfg.Validate(); err != nil {
		t.Error(err)
	}
	cfg.XDP = "auto"
	if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), "--balancer=ebpf") {
		t.Errorf("XDP with nftables: %v", err)
	}
	cfg.XDP, cfg.Flows = "off", 131072
	if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), "nf_conntrack_max") {
		t.Errorf("--flows with nftables: %v", err)
	}
	cfg.Balancer, cfg.XDP = "ebpf", "auto"
	if err := cfg.Validate(); err != nil {
		t.Error(err)
	}
	cfg.Flows = 1 << 30
	if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), "--flows=1073741824 is not between 1024 and 4194304") {
		t.Errorf("too many flows: %v", err)
	}
}

// A gateway without certificates says how to create them.
func TestNoCertificates(t *testing.T) {
	cfg, _ := config(t)
	cfg.Files.Cert = "/nowhere/tls.crt"
	if err := run(t.Context(), cfg, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "isthmusctl gateway certs") {
		t.Errorf("error %v", err)
	}
}
