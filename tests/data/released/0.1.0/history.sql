BEGIN TRANSACTION;
CREATE TABLE records (
        seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, uid INTEGER, pid INTEGER, fields TEXT NOT NULL
    );
INSERT INTO "records" VALUES(1,1.79550066911927556989e+09,'policy.loaded',NULL,NULL,'{"digest":"702cd1f02edc","files":["/tmp/mpsbx7ws_ypi/s/policy.toml"]}');
INSERT INTO "records" VALUES(2,1.79550066926738405227e+09,'action',NULL,NULL,'{"action":"StartControl","reason":"no control daemon is running","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"threads":10.0,"multiuser":false}');
INSERT INTO "records" VALUES(3,1.79550066967306137083e+09,'action.done',NULL,NULL,'{"action":"StartControl","begun":2,"ok":true,"text":"control daemon 30120 runs (started by this agent)","reason":"no control daemon is running","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"threads":10.0,"multiuser":false}');
INSERT INTO "records" VALUES(4,1.79550066968297243122e+09,'action',NULL,NULL,'{"action":"Reconcile","reason":"compare with what the control daemon says","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(5,1.79550066970049929616e+09,'action.done',NULL,NULL,'{"action":"Reconcile","begun":4,"ok":true,"text":"","reason":"compare with what the control daemon says","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(6,1.79550066995293188098e+09,'gate.connected',NULL,30103,'{}');
INSERT INTO "records" VALUES(7,1.79550066995600771904e+09,'action',NULL,NULL,'{"action":"Reconcile","reason":"confirm what a log says: servers of control daemon 30120","rule":"what a log says is confirmed before anything rests on it","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(8,1.79550066998033380511e+09,'action.done',NULL,NULL,'{"action":"Reconcile","begun":7,"ok":true,"text":"","reason":"confirm what a log says: servers of control daemon 30120","rule":"what a log says is confirmed before anything rests on it","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(9,1.79550067099308252333e+09,'client.waiting',20001,30249,'{"connection":2589492418}');
INSERT INTO "records" VALUES(10,1.7955006709940929413e+09,'turn.began',20001,NULL,'{}');
INSERT INTO "records" VALUES(11,1795500671.001,'server.starting',20001,30250,'{}');
INSERT INTO "records" VALUES(12,1795500671.165,'server.ready',20001,30250,'{}');
INSERT INTO "records" VALUES(13,1.79550067118218636508e+09,'limits.verified',20001,NULL,'{"reason":"server 30250 started with 10 %, 2G","rule":"promise 1: every client gets exactly its policy","enforce":true,"server":30250}');
INSERT INTO "records" VALUES(14,1.7955006711821217537e+09,'client.connected',20001,30249,'{"waited":0.1890392303466797,"limits":{"threads":10.0,"memory":{"0":2147483648}},"fail_safe":false,"handover":0.17857909202575684}');
INSERT INTO "records" VALUES(15,1.79550067267988753315e+09,'client.waiting',20002,30398,'{"connection":2591179223}');
INSERT INTO "records" VALUES(16,1.79550067275288891791e+09,'client.ended',20001,30249,'{"server":30250,"outcome":"ok","seconds":1.5707671642303467,"waited":0.1890392303466797}');
INSERT INTO "records" VALUES(17,1.79550067275724959366e+09,'turn.ended',20001,NULL,'{"seconds":1.7631566524505615,"forced":false}');
INSERT INTO "records" VALUES(18,1.7955006727583115101e+09,'action',NULL,NULL,'{"action":"ShutdownServer","reason":"the last client of server 30250 of user 20001 has gone and user 20002 waits","rule":"promise 2: the GPU is never idle while a user waits","enforce":true,"server":30250,"force":false}');
INSERT INTO "records" VALUES(19,1.79550067275970840451e+09,'client.used',20001,30249,'{"seconds":1.571,"busy":0.0,"energy":157.7,"shared":false,"over":true}');
INSERT INTO "records" VALUES(20,1.795500672777027607e+09,'action.done',NULL,NULL,'{"action":"ShutdownServer","begun":18,"ok":true,"text":"","reason":"the last client of server 30250 of user 20001 has gone and user 20002 waits","rule":"promise 2: the GPU is never idle while a user waits","enforce":true,"server":30250,"force":false}');
INSERT INTO "records" VALUES(21,1795500672.823,'server.ended',20001,30250,'{"status":0}');
INSERT INTO "records" VALUES(22,1.79550067282451462748e+09,'turn.began',20002,NULL,'{"gap":0.06726503372192383}');
INSERT INTO "records" VALUES(23,1795500672.844,'server.starting',20002,30409,'{}');
INSERT INTO "records" VALUES(24,1795500673.012,'server.ready',20002,30409,'{}');
INSERT INTO "records" VALUES(25,1.79550067303239870072e+09,'limits.verified',20002,NULL,'{"reason":"server 30409 started with 10 %, 2G","rule":"promise 1: every client gets exactly its policy","enforce":true,"server":30409}');
INSERT INTO "records" VALUES(26,1.79550067303233695033e+09,'client.connected',20002,30398,'{"waited":0.3524494171142578,"limits":{"threads":10.0,"memory":{"0":2147483648}},"fail_safe":false,"handover":0.19933462142944336}');
INSERT INTO "records" VALUES(27,1.79550067444317531586e+09,'lease.given',20003,NULL,'{"number":1,"by":0,"until":1821420674.4431753,"job":"job-7"}');
INSERT INTO "records" VALUES(28,1.79550067446071243289e+09,'drain.ordered',NULL,NULL,'{"by":0,"timeout":25920000.0}');
INSERT INTO "records" VALUES(29,1.79550067446086430546e+09,'drain.begun',NULL,NULL,'{"reason":"no new work is admitted; work goes on for 300d00h","rule":"drain","enforce":true}');
CREATE TABLE sessions (
        number INTEGER PRIMARY KEY, kind TEXT NOT NULL, instance TEXT, uid INTEGER, pid INTEGER NOT NULL,
        came REAL NOT NULL, passed REAL, ended REAL, outcome TEXT, why TEXT, job TEXT, more TEXT NOT NULL
    );
INSERT INTO "sessions" VALUES(9,'client',NULL,20001,30249,1.79550067099308252333e+09,1.7955006711821217537e+09,1.79550067275288891791e+09,'ok',NULL,NULL,'{"limits":{"threads":10.0,"memory":{"0":2147483648}},"memory":144703488,"counted":1.571,"busy":0.0,"energy":157.7,"shared":false}');
INSERT INTO "sessions" VALUES(10,'turn',NULL,20001,0,1.7955006709940929413e+09,1.7955006709940929413e+09,1.79550067275724959366e+09,'left',NULL,NULL,'{"gap":null,"before":null}');
INSERT INTO "sessions" VALUES(15,'client',NULL,20002,30398,1.79550067267988753315e+09,1.79550067303233695033e+09,NULL,NULL,NULL,NULL,'{"limits":{"threads":10.0,"memory":{"0":2147483648}},"memory":144703488}');
INSERT INTO "sessions" VALUES(22,'turn',NULL,20002,0,1.79550067282451462748e+09,1.79550067282451462748e+09,NULL,NULL,NULL,NULL,'{"gap":0.06726503372192383,"before":20001}');
CREATE INDEX records_uid ON records (uid) WHERE uid IS NOT NULL;
CREATE INDEX records_pid ON records (pid) WHERE pid IS NOT NULL;
CREATE INDEX sessions_kind ON sessions (kind, uid, passed, ended);
CREATE INDEX sessions_open ON sessions (number) WHERE ended IS NULL;
COMMIT;
PRAGMA user_version=4;
