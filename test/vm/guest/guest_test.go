// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRecordSurvivesTheSerialPort(t *testing.T) {
	for _, want := range []Record{
		{Kind: Note, Text: "mount /run: no such device\nsecond line"},
		{Kind: Ready, Text: "6.1.0-57-cloud-amd64"},
		{Kind: File, Path: "/tmp/cover out", Data: []byte{0, 0x1e, '\n', 0xff}},
		{Kind: Exit, Code: 137},
	} {
		line, err := want.Line()
		if err != nil {
			t.Fatal(err)
		}
		out, got := Cut(append([]byte("no newline at the end"), line...))
		if string(out) != "no newline at the end" {
			t.Errorf("%s: output %q, want what stood before the record", want.Kind, out)
		}
		if diff := cmp.Diff(&want, got); diff != "" {
			t.Errorf("%s: record changed on its way (-want +got):\n%s", want.Kind, diff)
		}
	}
}

func TestOutputIsNotTakenForARecord(t *testing.T) {
	for _, line := range []string{"", "\n", "ok\n", "\x1e\n", "\x1evminit:not json\n", "\x16--- PASS: TestX (0.00s)\n"} {
		out, rec := Cut([]byte(line))
		if rec != nil || string(out) != line {
			t.Errorf("Cut(%q) = %q, %+v; want the line and no record", line, out, rec)
		}
	}
}
