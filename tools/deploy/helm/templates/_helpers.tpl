{{- define "rekindle.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "rekindle.labels" -}}
app.kubernetes.io/part-of: rekindle
{{- end }}

{{- /* With several coordinators only the leader listens, so there is no one address. */}}
{{- define "rekindle.coordinators" -}}
{{- if .Values.etcd.enabled -}}
rekindle-coordinator-0.rekindle-coordinator-pods:7300,rekindle-coordinator-1.rekindle-coordinator-pods:7300,rekindle-coordinator-2.rekindle-coordinator-pods:7300
{{- else -}}
rekindle-coordinator:7300
{{- end }}
{{- end }}

{{- /* It makes the Pods restart when the configuration changes. */}}
{{- define "rekindle.configChecksum" -}}
checksum/config: {{ cat .Values.config (include "rekindle.coordinators" .) | sha256sum }}
{{- end }}

{{- define "rekindle.tight" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "rekindle.small" -}}
requests: {cpu: 10m, memory: 16Mi}
limits: {memory: 64Mi}
{{- end }}

{{- define "rekindle.unprivileged" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "rekindle.spread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      app.kubernetes.io/name: {{ . }}
{{- end }}

{{- /* A dict with `root` and `port`. */}}
{{- define "rekindle.scraped" -}}
{{- if .root.Values.metrics.enabled }}
prometheus.io/scrape: "true"
prometheus.io/port: {{ .port | quote }}
{{- end }}
{{- end }}

{{- define "rekindle.scraper" -}}
- from:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ .root.Values.metrics.namespace }}
  ports:
    - {protocol: TCP, port: {{ .port }}}
{{- end }}
