package apitest

import (
	"os"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

// Rights returns the roles in a file of controller-gen with bindings to a user, for an installation in namespace. ClusterRoles
// have the namespace in their names, so that installations of several tests may share an API server. The caller owns the
// result.
func Rights(t testing.TB, file, namespace, user string) []client.Object {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	subjects := []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}}
	var all []client.Object
	for doc := range strings.SplitSeq(string(text), "\n---\n") {
		var kind metav1.TypeMeta
		unmarshal(t, doc, &kind)
		ref := rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: kind.Kind}
		switch kind.Kind {
		case "ClusterRole":
			role := &rbacv1.ClusterRole{}
			unmarshal(t, doc, role)
			role.Name += "." + namespace
			ref.Name = role.Name
			all = append(all, role, &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: role.Name}, Subjects: subjects, RoleRef: ref})
		case "Role":
			role := &rbacv1.Role{}
			unmarshal(t, doc, role)
			role.Namespace = namespace
			ref.Name = role.Name
			all = append(all, role, &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: role.Name}, Subjects: subjects, RoleRef: ref})
		}
	}
	return all
}

func unmarshal(t testing.TB, doc string, into any) {
	t.Helper()
	if err := yaml.Unmarshal([]byte(doc), into); err != nil {
		t.Fatal(err)
	}
}

// OwnPolicy returns the admission policy with a name and its binding, which has the same name, from those of an installation
// in namespace. Both have the namespace in their names, as in Rights. It changes the objects of policies.
func OwnPolicy(policies []client.Object, name, namespace string) []client.Object {
	var own []client.Object
	for _, p := range policies {
		if p.GetName() != name {
			continue
		}
		p.SetName(name + "." + namespace)
		if binding, ok := p.(*admissionv1.ValidatingAdmissionPolicyBinding); ok {
			binding.Spec.PolicyName = p.GetName()
		}
		own = append(own, p)
	}
	return own
}
