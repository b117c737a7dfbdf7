// Package cluster runs real Kubernetes clusters on one Debian machine, without a container
// engine: every node is a set of Linux namespaces with its own containerd, kubelet and
// kube-proxy, and every control plane is another one.
//
// In: a Config (a name and a topology). Out: running clusters, with kubeconfigs, and ways
// to run commands on nodes, to dial from the network they share, and to break things.
//
//	lab, err := cluster.Open(cluster.Config{Name: "e2e", Topology: "a:2 b:1 broker:0"})
//	err = lab.Up(ctx)
//	defer lab.Down(context.WithoutCancel(ctx))
//
// Several labs run side by side when their names differ. All state of one is in one
// directory; Down removes it and everything else the lab made. The host's own network is
// never touched.
package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/tools/apiserver/pki"
	"github.com/isthmus-net/isthmus/tools/lab/internal/cache"
	"github.com/isthmus-net/isthmus/tools/lab/internal/fabric"
	"github.com/isthmus-net/isthmus/tools/lab/internal/kube"
	"github.com/isthmus-net/isthmus/tools/lab/internal/machine"
	"github.com/isthmus-net/isthmus/tools/lab/topology"
)

// DirVariable names the environment variable with the directory of all labs and their cache.
const DirVariable = "ISTHMUS_LAB_DIR"

const (
	defaultName = "lab"
	defaultDir  = "/var/tmp/isthmus"
	cacheFolder = "cache"
	// maxSocketPath is the size of sun_path in unix(7), less its terminating zero.
	maxSocketPath = 107
)

// TestImage is an image every node has, for the pods of tests: a shell, curl, dig,
// nslookup, nc, socat, gawk, iperf3, and the program echo-server (tools/lab/echo).
const TestImage = cache.TestImage

// Errors of methods that need a running lab.
var (
	ErrNoLab = errors.New("no lab of that name")
	ErrNotUp = errors.New("the lab is not up")
)

// Config describes a lab. Empty fields take the values of the lab of that name when it
// exists, else the defaults.
type Config struct {
	Name      string    // default "lab"
	Dir       string    // default $ISTHMUS_LAB_DIR, else /var/tmp/isthmus
	Source    string    // a checkout of this module; default: found upward from the working directory
	Topology  string    // default topology.Default
	ProxyMode string    // "nftables" (default) or "iptables"
	CNI       string    // "ptp" (default) or "bridge"
	Progress  io.Writer // gets one line a step; default: none
}

// Lab is a lab that may or may not be up.
type Lab struct {
	settings settings
	topology topology.Topology
	name     string
	dir      string // of this lab
	cache    cache.Cache
	fabric   fabric.Fabric

	began    time.Time
	mu       sync.Mutex // guards progress
	progress io.Writer
}

// settings are kept in the lab's directory, for later calls that name the lab alone.
type settings struct {
	Topology string
	kube.Options
	// Programs are the executables by name, of the last Up. Empty until then.
	Programs map[string]string
}

const settingsFile = "lab.json"

var labName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$`)

// Open returns the lab described by cfg. It starts nothing. The error joins every fault of cfg.
func Open(cfg Config) (*Lab, error) {
	if cfg.Name == "" {
		cfg.Name = defaultName
	}
	if cfg.Dir == "" {
		cfg.Dir = sharedDir()
	}
	if cfg.Progress == nil {
		cfg.Progress = io.Discard
	}
	dir := filepath.Join(cfg.Dir, "labs", cfg.Name)
	have, err := readSettings(dir)
	if err != nil {
		return nil, err
	}
	want := have
	if err := want.adopt(cfg, have); err != nil {
		return nil, err
	}
	l := &Lab{
		name:     cfg.Name,
		dir:      dir,
		settings: want,
		fabric:   fabric.Fabric{Lab: cfg.Name},
		progress: cfg.Progress,
		began:    time.Now(),
	}
	if cfg.Source == "" {
		if cfg.Source, err = workingCheckout(); err != nil {
			return nil, err
		}
	}
	l.cache = cache.Cache{
		Dir: filepath.Join(cfg.Dir, cacheFolder), Source: cfg.Source, Kubernetes: os.Getenv(cache.KubernetesVariable), Report: l.step,
	}
	if err := l.validate(cfg.Dir); err != nil {
		return nil, fmt.Errorf("lab %q: %w", cfg.Name, err)
	}
	return l, nil
}

// sharedDir is the directory of labs that were given none.
func sharedDir() string {
	if dir := os.Getenv(DirVariable); dir != "" {
		return dir
	}
	return defaultDir
}

// CacheDir is where the labs of this machine keep what they share, and where other tools may keep things
// under names of their own. It need not exist yet.
func CacheDir() string { return filepath.Join(sharedDir(), cacheFolder) }

func workingCheckout() (string, error) {
	wd, err := os.Getwd()
	if err != nil {
		return "", err
	}
	return cache.SourceDir(wd)
}

// adopt overlays what cfg asks for. A lab that exists keeps what it was made with.
func (s *settings) adopt(cfg Config, have settings) error {
	choose := func(field *string, name, asked, fallback string) error {
		switch {
		case *field == "" && asked == "":
			*field = fallback
		case *field == "":
			*field = asked
		case asked != "" && asked != *field:
			return fmt.Errorf("lab %q exists with %s %q, not %q: take it down first, or use another name", cfg.Name, name, *field, asked)
		}
		return nil
	}
	*s = have
	return errors.Join(
		choose(&s.Topology, "topology", canonical(cfg.Topology), topology.Default),
		choose(&s.ProxyMode, "proxy mode", cfg.ProxyMode, kube.ProxyModes[0]),
		choose(&s.CNI, "CNI", cfg.CNI, kube.CNIs[0]))
}

// canonical spells a topology the way settings hold it. A faulty one is reported by validate.
func canonical(s string) string {
	if t, err := topology.Parse(s); err == nil {
		return t.String()
	}
	return s
}

func (l *Lab) validate(base string) error {
	var errs []error
	if !labName.MatchString(l.name) {
		errs = append(errs, errors.New("the name is 1 to 32 lower-case letters, digits and dashes"))
	}
	t, err := topology.Parse(l.settings.Topology)
	errs = append(errs, err)
	l.topology = t
	if !slices.Contains(kube.ProxyModes, l.settings.ProxyMode) {
		errs = append(errs, fmt.Errorf("proxy mode %q is none of %s", l.settings.ProxyMode, strings.Join(kube.ProxyModes, ", ")))
	}
	if !slices.Contains(kube.CNIs, l.settings.CNI) {
		errs = append(errs, fmt.Errorf("CNI %q is none of %s", l.settings.CNI, strings.Join(kube.CNIs, ", ")))
	}
	if !filepath.IsAbs(base) {
		errs = append(errs, fmt.Errorf("directory %q is not absolute", base))
	}
	for _, hidden := range []string{"/run/", "/var/lib/", "/var/log/", "/etc/", "/sys/", "/proc/"} {
		if strings.HasPrefix(base+"/", hidden) {
			errs = append(errs, fmt.Errorf("directory %s: machines have a %s of their own and would not see it: set %s", base, strings.TrimSuffix(hidden, "/"), DirVariable))
		}
	}
	for _, m := range t.Machines() {
		if socket := machine.Socket(l.machineDir(m.Name)); len(socket) > maxSocketPath {
			errs = append(errs, fmt.Errorf("path %s is longer than the %d bytes of a unix socket's: use a shorter directory", socket, maxSocketPath))
		}
	}
	return errors.Join(errs...)
}

func readSettings(dir string) (settings, error) {
	var s settings
	path := filepath.Join(dir, settingsFile)
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(raw, &s); err != nil {
		return s, fmt.Errorf("parse %s: %w", path, err)
	}
	return s, nil
}

func (l *Lab) writeSettings() error {
	raw, err := json.MarshalIndent(l.settings, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(l.dir, settingsFile), raw, 0o644)
}

// known returns ErrNoLab unless some Up has made the lab, or begun to.
func (l *Lab) known() error {
	_, err := os.Stat(filepath.Join(l.dir, settingsFile))
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	labs := filepath.Dir(l.dir)
	entries, err := os.ReadDir(labs)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var names []string
	for _, e := range entries {
		if _, err := os.Stat(filepath.Join(labs, e.Name(), settingsFile)); err == nil {
			names = append(names, e.Name())
		}
	}
	if len(names) == 0 {
		names = []string{"none"}
	}
	return fmt.Errorf("lab %q: %w in %s, which holds %s", l.name, ErrNoLab, labs, strings.Join(names, ", "))
}

// usable returns ErrNoLab or ErrNotUp when nothing can run in the lab.
func (l *Lab) usable() error {
	if err := l.known(); err != nil {
		return err
	}
	if len(l.settings.Programs) == 0 {
		return fmt.Errorf("lab %q: %w", l.name, ErrNotUp)
	}
	return nil
}

// Name is the lab's name.
func (l *Lab) Name() string { return l.name }

// Dir holds all state of the lab, logs too: Dir/machines/<machine>/log/<component>.log.
func (l *Lab) Dir() string { return l.dir }

// Topology says which clusters and nodes there are and what addresses they have.
func (l *Lab) Topology() topology.Topology { return l.topology }

// Kubeconfig is the administrator's kubeconfig of a cluster. Its server is reachable from
// the fabric, from nodes and from pods; see FabricCommand and RESTConfig.
func (l *Lab) Kubeconfig(cluster string) string {
	return pki.Kubeconfig(l.pkiDir(cluster), kube.Admin)
}

// EchoProgram is the program echo-server of the test image as a static executable, for
// NodeCommand and FabricCommand. Empty unless the lab is up.
func (l *Lab) EchoProgram() string { return l.settings.Programs["echo"] }

func (l *Lab) machineDir(name string) string   { return filepath.Join(l.dir, "machines", name) }
func (l *Lab) pkiDir(cluster string) string    { return filepath.Join(l.dir, "pki", cluster) }
func (l *Lab) group(machineName string) string { return "isthmus." + l.name + "." + machineName }

func (l *Lab) machine(name string) machine.Machine {
	return machine.Machine{Dir: l.machineDir(name), Init: l.settings.Programs["nodeinit"]}
}

// find returns a machine of the topology, or an error that lists them.
func (l *Lab) find(name string) (machine.Machine, error) {
	var names []string
	for _, m := range l.topology.Machines() {
		if m.Name == name {
			return l.machine(name), nil
		}
		names = append(names, m.Name)
	}
	return machine.Machine{}, fmt.Errorf("no machine %q in lab %q, there are %s", name, l.name, strings.Join(names, ", "))
}

// step reports one line of progress, with the time since Open.
func (l *Lab) step(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintf(l.progress, "%6.1fs  %s\n", time.Since(l.began).Seconds(), fmt.Sprintf(format, args...))
}
