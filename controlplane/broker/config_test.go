package broker_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// contextAfter outlives the test's own context, for cleaning up.
func contextAfter(t *testing.T) context.Context {
	t.Helper()
	return context.WithoutCancel(t.Context())
}

// hostile returns an export of service hello in a namespace as a hostile member may publish it.
func hostile(namespace string) clusterset.Export {
	return clusterset.Export{
		Cluster: "evil", Service: clusterset.ServiceName{Namespace: namespace, Name: "hello"},
		ExportedAt: time.Unix(0, 0), Type: clusterset.Headless,
	}
}

func TestConfigNamesEverythingMissing(t *testing.T) {
	err := broker.Config{}.Validate()
	for _, field := range []string{"Local", "Namespace", "Broker", "BrokerNamespace", "Log"} {
		if err == nil || !strings.Contains(err.Error(), field+" is missing") {
			t.Errorf("%s: %v", field, err)
		}
	}
	ok := broker.Config{
		Local: &rest.Config{}, Namespace: "n", Broker: &rest.Config{}, BrokerNamespace: "b", Log: slog.New(slog.DiscardHandler),
	}
	if err := ok.Validate(); err != nil {
		t.Error(err)
	}
}

func TestLoadBrokerRefuses(t *testing.T) {
	for name, text := range map[string]string{
		"not YAML":     "{{{",
		"empty":        "",
		"no server":    "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: c, user: u, namespace: isthmus-broker}}]\n",
		"no namespace": "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: c, user: u}}]\n",
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "kubeconfig")
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			_, _, err := broker.LoadBroker(path)
			if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "isthmusctl join") ||
				strings.HasPrefix(name, "no ") && !strings.Contains(err.Error(), "names "+name) {
				t.Errorf("error %v", err)
			}
		})
	}
	if _, _, err := broker.LoadBroker("/does/not/exist"); err == nil || !strings.Contains(err.Error(), "does not exist") {
		t.Errorf("missing file: %v", err)
	}
}

func TestLoadBroker(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := `apiVersion: v1
kind: Config
current-context: broker
clusters: [{name: broker, cluster: {server: "https://192.0.2.1:6443"}}]
users: [{name: a, user: {token: secret}}]
contexts: [{name: broker, context: {cluster: broker, user: a, namespace: isthmus-broker}}]
`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, namespace, err := broker.LoadBroker(path)
	if err != nil || namespace != "isthmus-broker" || cfg.Host != "https://192.0.2.1:6443" || cfg.BearerToken != "secret" {
		t.Errorf("LoadBroker = %v, %q, %v", cfg, namespace, err)
	}
}

func TestNewRefusesInvalidRegistrations(t *testing.T) {
	for name, edit := range map[string]func(*v1alpha1.MemberSpec){
		"no CIDR":          func(m *v1alpha1.MemberSpec) { m.ClusterSetIPCIDR = []string{"243.0.0.0"} },
		"host bits":        func(m *v1alpha1.MemberSpec) { m.ClusterSetIPCIDR = []string{"243.0.0.1/16"} },
		"two of a family":  func(m *v1alpha1.MemberSpec) { m.ClusterSetIPCIDR = []string{"243.0.0.0/16", "243.1.0.0/16"} },
		"not a cluster id": func(m *v1alpha1.MemberSpec) { m.ClusterID = "Not_An_ID" },
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestbed(t, edit)
			_, err := broker.New(t.Context(), w.a.controllerConfig())
			if err == nil || !strings.Contains(err.Error(), "isthmusctl join") {
				t.Errorf("New: %v", err)
			}
		})
	}
	for name, want := range map[string]string{"none": "has no Member, so this cluster has not joined; run isthmusctl join", "two": "(a, other) and needs exactly one; delete all but"} {
		t.Run(name, func(t *testing.T) {
			w := newTestbed(t)
			if name == "none" {
				w.noError(w.a.DeleteAllOf(t.Context(), &v1alpha1.Member{}, inNamespace(w.a.install)))
			} else {
				w.create(w.a, &v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Namespace: w.a.install, Name: "other"}, Spec: v1alpha1.MemberSpec{ClusterID: "other", JoinTime: metav1.Now()}})
			}
			_, err := broker.New(t.Context(), w.a.controllerConfig())
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("New: %v", err)
			}
		})
	}
}

// Nodes read the ranges of the ClusterSet from their own API server. The ranges stay when the broker loses its
// ClusterSetConfig.
func TestMemberReportsTheRanges(t *testing.T) {
	w := newTestbed(t).run()
	knows := func(want ...string) {
		t.Helper()
		w.eventually(func() error {
			var self v1alpha1.Member
			w.noError(w.a.Get(t.Context(), types.NamespacedName{Namespace: w.a.install, Name: "a"}, &self))
			if !slices.Equal(self.Status.ClusterSetIPCIDRRange, want) {
				return fmt.Errorf("the status of a's registration says %v, want %v", self.Status.ClusterSetIPCIDRRange, want)
			}
			return nil
		})
	}
	knows("243.0.0.0/8", "fd00:243::/32")
	w.quiet()
	config := &v1alpha1.ClusterSetConfig{ObjectMeta: metav1.ObjectMeta{Namespace: w.brokerNS, Name: v1alpha1.ClusterSetConfigName}}
	edit(w, w.broker, config, func(c *v1alpha1.ClusterSetConfig) { c.Spec.ClusterSetIPCIDRRange = []string{"243.0.0.0/8"} })
	knows("243.0.0.0/8")
	w.wipe(&v1alpha1.ClusterSetConfig{})
	w.quiet()
	knows("243.0.0.0/8")
}
