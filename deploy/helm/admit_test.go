// Package helm tests the chart against a real API server.
package helm

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/compile"
)

// namespace is the release's.
const namespace = "isthmus-system"

var server apitest.Server

func TestMain(m *testing.M) { os.Exit(apitest.Run(m, &server)) }

// An API server accepts all objects of the chart, with the defaults and with all values for linters: it knows every field, its own
// validation finds no fault, and it warns of nothing. tools/check/tree checks every rendering of its tests against the schemas alone.
func TestServerAcceptsChart(t *testing.T) {
	t.Parallel()
	config := server.Config(t)
	var warned warnings
	config.WarningHandlerWithContext = &warned
	c, err := client.New(config, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("isthmus/ci/*-values.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("there are no values for linters: %v", err)
	}
	kinds := map[string]bool{}
	for _, file := range files {
		for _, object := range rendered(t, file) {
			kinds[object.GetKind()] = true
			about := filepath.Base(file) + ": " + object.GetKind() + " " + object.GetName()
			if group := object.GroupVersionKind().Group; slices.Contains([]string{"monitoring.coreos.com", "security.openshift.io"}, group) {
				continue // the server lacks it
			}
			how := []client.CreateOption{client.FieldValidation(metav1.FieldValidationStrict), client.DryRunAll}
			if object.GetKind() == "ServiceAccount" { // a pod needs it
				how = how[:1]
			}
			if err := c.Create(t.Context(), object, how...); err != nil && !apierrors.IsAlreadyExists(err) {
				t.Errorf("%s: %v", about, err)
			}
			for _, w := range warned.take() {
				t.Errorf("%s: the server warns: %s", about, w)
			}
		}
	}
	for _, kind := range []string{"DaemonSet", "Deployment", "ValidatingAdmissionPolicy", "NetworkPolicy", "PodDisruptionBudget", "Pod", "Namespace"} {
		if !kinds[kind] {
			t.Errorf("no values render a %s", kind)
		}
	}
}

// rendered returns the objects that the chart renders with a file of values, in the order of Helm.
func rendered(t *testing.T, file string) []*unstructured.Unstructured {
	t.Helper()
	helm, err := compile.Helm(t.Context(), "../..")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), helm, "template", "isthmus", "deploy/helm/isthmus", "--namespace", namespace, "--values", filepath.Join("deploy/helm", file))
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("helm template --values %s: %v", file, err)
	}
	var objects []*unstructured.Unstructured
	for document := range strings.SplitSeq(string(out), "\n---\n") {
		object := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(document), &object.Object); err != nil {
			t.Fatalf("parse the output of helm: %v\n%s", err, document)
		}
		if len(object.Object) > 0 {
			objects = append(objects, object)
		}
	}
	return objects
}

// warnings keeps the warnings of a server.
type warnings struct {
	mu  sync.Mutex
	all []string
}

func (w *warnings) HandleWarningHeaderWithContext(_ context.Context, _ int, _, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = append(w.all, text)
}

func (w *warnings) take() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := w.all
	w.all = nil
	return all
}
