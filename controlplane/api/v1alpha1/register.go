package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion is the API group and version of this package.
var GroupVersion = schema.GroupVersion{Group: "isthmus.dev", Version: "v1alpha1"}

// AddToScheme registers the kinds of this package with a scheme.
var AddToScheme = (&runtime.SchemeBuilder{addKinds}).AddToScheme

func addKinds(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion,
		&ClusterSetConfig{}, &ClusterSetConfigList{},
		&Member{}, &MemberList{},
		&ExportRecord{}, &ExportRecordList{},
		&NodeReport{}, &NodeReportList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}
