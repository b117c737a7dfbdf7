package access_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/controlplane/api/access"
	"github.com/isthmus-net/isthmus/tools/await"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// policiesOf returns the policies of the broker in namespace, and how many bindings each has.
func policiesOf(t testing.TB, namespace string) ([]*admissionv1.ValidatingAdmissionPolicy, map[string][]*admissionv1.ValidatingAdmissionPolicyBinding) {
	t.Helper()
	objects, err := access.Policies(namespace)
	if err != nil {
		t.Fatal(err)
	}
	var policies []*admissionv1.ValidatingAdmissionPolicy
	bindings := map[string][]*admissionv1.ValidatingAdmissionPolicyBinding{}
	for _, o := range objects {
		switch o := o.(type) {
		case *admissionv1.ValidatingAdmissionPolicy:
			policies = append(policies, o)
		case *admissionv1.ValidatingAdmissionPolicyBinding:
			bindings[o.Spec.PolicyName] = append(bindings[o.Spec.PolicyName], o)
		}
	}
	return policies, bindings
}

// Every policy refuses a request that it cannot evaluate, is in force, and applies only to its broker.
func TestPoliciesFailClosed(t *testing.T) {
	t.Parallel()
	policies, bindings := policiesOf(t, "here")
	if len(policies) != 11 {
		t.Errorf("%d policies, want 11", len(policies))
	}
	for _, p := range policies {
		if *p.Spec.FailurePolicy != admissionv1.Fail {
			t.Errorf("%s: failurePolicy is %s", p.Name, *p.Spec.FailurePolicy)
		}
		if s := p.Spec.MatchConstraints.NamespaceSelector; s.MatchLabels["kubernetes.io/metadata.name"] != "here" {
			t.Errorf("%s looks at namespaces %v", p.Name, s)
		}
		if len(bindings[p.Name]) == 0 {
			t.Errorf("%s is bound nowhere", p.Name)
		}
		for _, b := range bindings[p.Name] {
			if !slices.Equal(b.Spec.ValidationActions, []admissionv1.ValidationAction{admissionv1.Deny}) {
				t.Errorf("%s does %v", b.Name, b.Spec.ValidationActions)
			}
			if (b.Spec.ParamRef != nil) != (p.Spec.ParamKind != nil) {
				t.Errorf("%s: the parameter of %s is %v, its kind %v", b.Name, p.Name, b.Spec.ParamRef, p.Spec.ParamKind)
			}
		}
		for _, v := range p.Spec.Validations {
			if v.MessageExpression == "" || *v.Reason != metav1.StatusReasonForbidden {
				t.Errorf("%s: %s has no message, or another reason than Forbidden", p.Name, v.Expression)
			}
		}
		text, err := yaml.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(text, []byte("BROKER")) || !strings.Contains(p.Name, ".here.") {
			t.Errorf("%s does not name its namespace everywhere", p.Name)
		}
	}
}

func TestPoliciesOfInvalidNamespace(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"", "a.b", `x"]`, "Here"} {
		if objects, err := access.Policies(name); err == nil {
			t.Errorf("%q can be no namespace, and has %d policies", name, len(objects))
		}
	}
}

// The policy for members and one for the kind cover every write that RBAC permits.
func TestEveryRightHasAPolicy(t *testing.T) {
	t.Parallel()
	policies, _ := policiesOf(t, "here")
	operations := map[string]admissionv1.OperationType{
		"create": admissionv1.Create, "update": admissionv1.Update, "patch": admissionv1.Update, "delete": admissionv1.Delete,
	}
	writes := 0
	for _, rule := range access.MemberBrokerRules() {
		for _, resource := range rule.Resources {
			kind, _, sub := strings.Cut(resource, "/")
			switch {
			case resource == "endpointslices/restricted":
				continue // a right that lets pass more of endpointslices, and no resource
			case sub:
				kind += "/*"
			}
			for _, verb := range rule.Verbs {
				operation, ok := operations[verb]
				if !ok {
					continue
				}
				writes++
				var held []string
				for _, p := range policies {
					if slices.ContainsFunc(p.Spec.MatchConstraints.ResourceRules, func(r admissionv1.NamedRuleWithOperations) bool {
						return slices.Contains(r.APIGroups, rule.APIGroups[0]) && slices.Contains(r.Resources, kind) && slices.Contains(r.Operations, operation)
					}) {
						held = append(held, p.Name)
					}
				}
				if len(held) < 2 || !slices.Contains(held, "isthmus.here.members") {
					t.Errorf("RBAC lets members %s %s, and only %v looks at it", verb, resource, held)
				}
			}
		}
	}
	if writes == 0 {
		t.Error("RBAC lets members write nothing")
	}
}

// Kubernetes compares every expression with the schemas of its objects, as its controller manager does, and has no
// warning.
func TestPoliciesTypeCheck(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	startTypeChecker(t)
	policies, _ := policiesOf(t, b.namespace)
	for _, p := range policies {
		if warnings := b.typeCheck(p); len(warnings) > 0 {
			t.Errorf("%s: %v", p.Name, warnings)
		}
	}

	// It would have warned.
	wrong := policies[0].DeepCopy()
	wrong.ObjectMeta = metav1.ObjectMeta{Name: b.namespace + ".wrong"}
	wrong.Spec.ParamKind, wrong.Spec.Variables = nil, nil
	wrong.Spec.Validations = []admissionv1.Validation{{Expression: "object.spec.noSuchField == 1"}}
	b.write(wrong)
	t.Cleanup(func() { b.noError(b.admin.Delete(context.WithoutCancel(t.Context()), wrong)) })
	if warnings := b.typeCheck(wrong); len(warnings) == 0 {
		t.Error("a field that does not exist was not noticed")
	}
}

// typeCheck returns what Kubernetes warns of in the policy, once it has looked.
func (b *broker) typeCheck(p *admissionv1.ValidatingAdmissionPolicy) []admissionv1.ExpressionWarning {
	b.t.Helper()
	await.NoError(b.t, "the type check of "+p.Name, func() error {
		if err := b.admin.Get(b.t.Context(), client.ObjectKeyFromObject(p), p); err != nil {
			return err
		}
		if p.Status.TypeChecking == nil || p.Status.ObservedGeneration != p.Generation {
			return errors.New("not checked yet")
		}
		return nil
	})
	return p.Status.TypeChecking.ExpressionWarnings
}

// startTypeChecker runs the one controller of Kubernetes that checks policies, until the test ends.
func startTypeChecker(t *testing.T) {
	t.Helper()
	program := filepath.Join(os.Getenv("KUBEBUILDER_ASSETS"), "kube-controller-manager")
	if _, err := os.Stat(program); err != nil {
		netlab.Skip(t, fmt.Sprintf("there is no kube-controller-manager: %v; make test builds it", err))
	}
	admin := server.Config(t)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"c": {Server: "https://" + strings.TrimPrefix(admin.Host, "https://"), CertificateAuthorityData: admin.CAData}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"u": {Token: admin.BearerToken}},
		Contexts:       map[string]*clientcmdapi.Context{"x": {Cluster: "c", AuthInfo: "u"}},
		CurrentContext: "x",
	}, kubeconfig); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "--kubeconfig="+kubeconfig, "--controllers=validatingadmissionpolicy-status-controller", "--leader-elect=false", "--secure-port=0")
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("kube-controller-manager:\n%s", log.String())
		}
	})
}
