package main

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"fmt"
	"net/url"
	"os"
	"regexp"
	"runtime/debug"
	"strings"
	"time"

	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx/v2/common"
	spdx "github.com/spdx/tools-golang/spdx/v2/v2_3"

	"github.com/isthmus-net/isthmus/tools/images/deb"
)

// sbomSuffix ends the name of a bill of materials.
const sbomSuffix = ".spdx.json"

// describe writes the bill of materials (SPDX 2.3) of a program or an image, called name: the Go modules that the linker recorded in
// the program, and the Debian packages beside it.
func (r *release) describe(name, program string, packages []deb.Package) error {
	content, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	built, err := buildinfo.Read(bytes.NewReader(content))
	if err != nil {
		return fmt.Errorf("read what %s is made of: %w", name, err)
	}
	digest := sha256.Sum256(content)
	sum := hex.EncodeToString(digest[:])
	doc := &spdx.Document{
		SPDXVersion: spdx.Version, DataLicense: spdx.DataLicense, SPDXIdentifier: "DOCUMENT", DocumentName: name,
		DocumentNamespace: fmt.Sprintf("%s/releases/download/%s/%s-%s", homepage, r.version, name, sum),
		CreationInfo: &spdx.CreationInfo{
			Creators: []common.Creator{{CreatorType: "Organization", Creator: "Isthmus"}, {CreatorType: "Tool", Creator: "isthmus-release-" + r.version}},
			Created:  r.stamp.Date.Format(time.RFC3339),
		},
	}
	main := addPackage(doc, name, r.version, "pkg:golang/"+built.Main.Path+"@"+r.version)
	main.PackageLicenseDeclared = "Apache-2.0"
	main.PackageDownloadLocation = "git+" + homepage + "@" + r.stamp.Commit
	main.PackageChecksums = []common.Checksum{{Algorithm: common.SHA256, Value: sum}}
	relate(doc, "DOCUMENT", main.PackageSPDXIdentifier, common.TypeRelationshipDescribe)
	contains := func(p *spdx.Package) {
		relate(doc, main.PackageSPDXIdentifier, p.PackageSPDXIdentifier, common.TypeRelationshipContains)
	}
	compiler := strings.TrimPrefix(built.GoVersion, "go")
	contains(addPackage(doc, "stdlib", compiler, "pkg:golang/stdlib@"+compiler))
	for _, module := range built.Deps {
		contains(addPackage(doc, module.Path, module.Version, purlOf(module)))
	}
	for _, p := range packages {
		contains(addPackage(doc, p.Name, p.Version, fmt.Sprintf("pkg:deb/debian/%s@%s?arch=%s", p.Name, url.QueryEscape(p.Version), p.Architecture)))
	}
	var out bytes.Buffer
	if err := spdxjson.Write(doc, &out, spdxjson.Indent(" ")); err != nil {
		return err
	}
	return os.WriteFile(r.path(name+sbomSuffix), out.Bytes(), 0o644)
}

// purlOf returns the package URL of a Go module (https://github.com/package-url/purl-spec).
func purlOf(m *debug.Module) string {
	if m.Replace != nil {
		m = m.Replace
	}
	return "pkg:golang/" + m.Path + "@" + m.Version
}

// notInID matches what an SPDX identifier cannot contain.
var notInID = regexp.MustCompile(`[^A-Za-z0-9.-]+`)

// addPackage adds a package, about whose licence the document asserts nothing.
func addPackage(doc *spdx.Document, name, version, purl string) *spdx.Package {
	p := &spdx.Package{
		PackageName: name, PackageVersion: version,
		PackageSPDXIdentifier:   common.ElementID(notInID.ReplaceAllString(fmt.Sprintf("Package-%s-%s", name, version), "-")),
		PackageDownloadLocation: "NOASSERTION", PackageLicenseConcluded: "NOASSERTION", PackageLicenseDeclared: "NOASSERTION",
		PackageCopyrightText: "NOASSERTION",
		PackageExternalReferences: []*spdx.PackageExternalReference{
			{Category: common.CategoryPackageManager, RefType: common.TypePackageManagerPURL, Locator: purl},
		},
	}
	doc.Packages = append(doc.Packages, p)
	return p
}

func relate(doc *spdx.Document, a, b common.ElementID, how string) {
	doc.Relationships = append(doc.Relationships, &spdx.Relationship{
		RefA: common.MakeDocElementID("", string(a)), RefB: common.MakeDocElementID("", string(b)), Relationship: how,
	})
}
