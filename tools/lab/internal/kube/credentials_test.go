package kube_test

import (
	"testing"

	"k8s.io/client-go/tools/clientcmd"

	"github.com/isthmus-net/isthmus/tools/apiserver/pki"
	"github.com/isthmus-net/isthmus/tools/lab/internal/kube"
	"github.com/isthmus-net/isthmus/tools/lab/topology"
)

// A KUBECONFIG that lists the kubeconfigs of several clusters reaches each with its own certificate. The conformance suite and
// users with two clusters use such a list.
func TestKubeconfigsMerge(t *testing.T) {
	clusters, err := topology.Parse("a:1 b:1")
	if err != nil {
		t.Fatal(err)
	}
	rules := clientcmd.ClientConfigLoadingRules{}
	for _, c := range clusters {
		dir := t.TempDir()
		if err := kube.WriteCredentials(dir, c); err != nil {
			t.Fatal(err)
		}
		rules.Precedence = append(rules.Precedence, pki.Kubeconfig(dir, kube.Admin))
	}
	merged, err := rules.Load()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]string{}
	for _, c := range clusters {
		user := merged.AuthInfos[merged.Contexts[c.Name].AuthInfo]
		if user == nil {
			t.Fatalf("context %s has no user", c.Name)
		}
		if other, taken := seen[string(user.ClientCertificateData)]; taken {
			t.Errorf("contexts %s and %s share one certificate", other, c.Name)
		}
		seen[string(user.ClientCertificateData)] = c.Name
	}
}
