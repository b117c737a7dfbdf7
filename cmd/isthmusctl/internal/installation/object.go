package installation

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"helm.sh/helm/v4/pkg/release/v1/util"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

// Labels of the chart's objects.
const (
	labelName    = "app.kubernetes.io/name"
	labelPartOf  = "app.kubernetes.io/part-of"
	labelVersion = "app.kubernetes.io/version"
)

// object is one object of a manifest.
type object struct {
	*unstructured.Unstructured
	text string
}

// split returns the objects of a manifest, in its order.
func split(manifest string) ([]object, error) {
	parts := util.SplitManifests(manifest)
	keys := slices.SortedFunc(maps.Keys(parts), func(a, b string) int { return compareNumbers(a, b) })
	var all []object
	for _, k := range keys {
		u := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(parts[k]), &u.Object); err != nil {
			return nil, fmt.Errorf("read a manifest of the Helm release: %w", err)
		}
		if len(u.Object) > 0 {
			all = append(all, object{u, parts[k]})
		}
	}
	return all, nil
}

// compareNumbers orders the keys of SplitManifests, which end in a number.
func compareNumbers(a, b string) int {
	if len(a) != len(b) {
		return len(a) - len(b)
	}
	return strings.Compare(a, b)
}

// id identifies an object in a cluster.
func (o object) id() string {
	return strings.Join([]string{o.GroupVersionKind().GroupKind().String(), o.GetNamespace(), o.GetName()}, "/")
}

// String names an object for people.
func (o object) String() string { return o.GetKind() + " " + o.GetName() }

// images returns the images of a workload's containers, without those that repeat.
func (o object) images() []string {
	var all []string
	for _, list := range []string{"initContainers", "containers"} {
		containers, _, _ := unstructured.NestedSlice(o.Object, "spec", "template", "spec", list)
		for _, c := range containers {
			fields, _ := c.(map[string]any)
			if image, _ := fields["image"].(string); image != "" && !slices.Contains(all, image) {
				all = append(all, image)
			}
		}
	}
	return all
}

// isWorkload reports whether a change of o replaces pods.
func (o object) isWorkload() bool { return len(o.images()) > 0 }

// replacedByHand reports whether a DaemonSet's pods are replaced only when somebody deletes them.
func (o object) replacedByHand() bool {
	kind, _, _ := unstructured.NestedString(o.Object, "spec", "updateStrategy", "type")
	return kind == "OnDelete"
}

// sameBut reports whether two versions of an object differ at most in labels that name the version.
func sameBut(a, b object) bool {
	return equality.Semantic.DeepEqual(withoutVersion(a.Object), withoutVersion(b.Object))
}

// withoutVersion returns a copy of fields without labels that name the version.
func withoutVersion(fields map[string]any) map[string]any {
	out := map[string]any{}
	for k, v := range fields {
		switch v := v.(type) {
		case map[string]any:
			out[k] = withoutVersion(v)
		default:
			if k != labelVersion && k != "helm.sh/chart" {
				out[k] = v
			}
		}
	}
	return out
}
