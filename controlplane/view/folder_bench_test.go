package view

import (
	"fmt"
	"strings"
	"testing"
)

// A file with 100 Services of 10 endpoints each, as kubectl writes it in either form.
func BenchmarkParse(b *testing.B) {
	var items []string
	for i := range 100 {
		items = append(items, fmt.Sprintf(`{"apiVersion":"multicluster.x-k8s.io/v1beta1","kind":"ServiceImport","metadata":{"namespace":"demo","name":"s%d"},`+
			`"spec":{"type":"ClusterSetIP","ips":["243.0.0.%d"],"ports":[{"name":"http","protocol":"TCP","port":80}]}}`, i, i))
		var pods []string
		for e := range 10 {
			pods = append(pods, fmt.Sprintf(`{"addresses":["10.1.%d.%d"],"conditions":{"ready":true,"serving":true},"nodeName":"node-%d","zone":"z1"}`, i, e, e))
		}
		items = append(items, fmt.Sprintf(`{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"namespace":"demo","name":"s%d-1","labels":`+
			`{"multicluster.kubernetes.io/service-name":"s%d","multicluster.kubernetes.io/source-cluster":"a"}},"addressType":"IPv4",`+
			`"ports":[{"name":"http","protocol":"TCP","port":8080}],"endpoints":[%s]}`, i, i, strings.Join(pods, ",")))
	}
	for form, text := range map[string]string{
		"json": `{"apiVersion":"v1","kind":"List","items":[` + strings.Join(items, ",") + `]}`,
		"yaml": "apiVersion: v1\nkind: List\nitems:\n- " + strings.Join(items, "\n- ") + "\n",
	} {
		b.Run(form, func(b *testing.B) {
			for b.Loop() {
				if m, err := parse([]byte(text)); err != nil || len(m.members) != 100 {
					b.Fatal(len(m.members), err)
				}
			}
		})
	}
}
